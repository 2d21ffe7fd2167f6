// Runs a call on packed sequences as one call per sequence, so that each sequence gets the same
// bits as in a call of its own.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tasks.h"

namespace selective_scan::cpu {

/// The calls that a call consists of: itself, or one per packed sequence.
template <class Params>
class Calls {
 public:
  /// `params_of` returns the parameters of a sequence's call. `is_parallel` says whether all calls
  /// together are large enough for more than one thread.
  Calls(const Params& params, Params (*params_of)(const Params&, int64_t), bool is_parallel,
        const ThreadPool& pool)
      : params_(params), params_of_(params_of), is_parallel_(is_parallel), pool_(pool) {}

  int64_t count() const { return is_packed() ? params_.packed.count : 1; }
  Params operator[](int64_t index) const {
    return is_packed() ? params_of_(params_, index) : params_;
  }

  /// Returns the bytes of memory for run(), where bytes(call, pool) is the size for one call.
  template <class Bytes>
  int64_t workspace_bytes(const Bytes& bytes) const {
    int64_t for_all_threads = 0, for_one_thread = 0;
    for (int64_t i = 0; i < count(); ++i) {
      const Params call = (*this)[i];
      int64_t& most = is_long(call) ? for_all_threads : for_one_thread;
      most = std::max(most, bytes(call, is_long(call) ? pool_ : pool_.one_thread()));
    }
    return std::max(for_all_threads, pool_.num_threads * round_up(for_one_thread, kAlignment));
  }

  /// Calls run(index, call, workspace, pool) for every call: first for the long ones in turn, each
  /// on all threads, then for the short ones concurrently, each on one thread. A call's bits are
  /// the same either way.
  template <class Run>
  void run(void* workspace, int64_t workspace_bytes, const Run& run) const {
    int64_t num_short = 0;
    for (int64_t i = 0; i < count(); ++i) {
      const Params call = (*this)[i];
      if (is_long(call)) {
        run(i, call, workspace, pool_);
      } else {
        ++num_short;
      }
    }
    if (num_short == 0) return;
    const int64_t bytes = workspace_bytes / pool_.num_threads / kAlignment * kAlignment;
    run_tasks(count(), is_parallel_ ? pool_.num_threads : 1, pool_, [&](int64_t i, int64_t worker) {
      const Params call = (*this)[i];
      if (!is_long(call)) {
        run(i, call, static_cast<char*>(workspace) + worker * bytes, pool_.one_thread());
      }
    });
  }

 private:
  static constexpr int64_t kAlignment = Arena::kAlignment;

  bool is_packed() const { return params_.packed.present(); }
  /// Returns whether the call, on one thread, would leave other threads without work at the end.
  bool is_long(const Params& call) const {
    constexpr int64_t kCallsOfThread = 4;
    return !is_packed() || call.seqlen * kCallsOfThread * pool_.num_threads > params_.seqlen;
  }

  const Params& params_;
  Params (*params_of_)(const Params&, int64_t);
  bool is_parallel_;
  const ThreadPool& pool_;
};

}  // namespace selective_scan::cpu
