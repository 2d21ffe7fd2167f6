// Huge pages for large results on a CPU.
#pragma once

#include <cstdint>

#include "../core/config.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace selective_scan::op {

/// Below this size, the call costs more than it can save.
constexpr int64_t kAdvisedBytes = 1 << 20;

/// Asks the system to back memory with huge pages if it leaves that choice to the program, as NumPy
/// does. Memory that malloc has just got from the system arrives page by page, at the first write
/// to each page. For a large result that is a good part of the scan's time; see
/// docs/kernels/cpu.md.
inline void advise_huge_pages(void* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  if (bytes < kAdvisedBytes) return;
  // The range includes pages shared with neighbors: adjacent results form one range of huge pages.
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(data) / page * page;
  const auto end =
      round_up(reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes), page);
  // A system without huge pages refuses; nothing depends on them.
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace selective_scan::op
