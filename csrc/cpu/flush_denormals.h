// The processor's mode for denormal numbers, which many processors handle a hundred times as slowly
// as others. Nothing here depends on the instruction set.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace selective_scan::cpu {

/// During its lifetime, denormal operands and results of this thread's arithmetic are 0, in single
/// and double precision; the destructor restores the previous mode. It has no effect on processors
/// that are not named here.
///
/// A thread started during this lifetime would inherit the mode for good, so an object lives within
/// a task, never around a call of the pool.
class FlushDenormals {
 public:
  FlushDenormals() : before_(control()) {
    if ((before_ & kFlush) != kFlush) set_control(before_ | kFlush);
  }
  ~FlushDenormals() {
    // The other bits record the exceptions that occurred.
    if ((before_ & kFlush) != kFlush) set_control((control() & ~kFlush) | (before_ & kFlush));
  }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
#if defined(__x86_64__)
  using Control = uint32_t;
  static constexpr Control kFlush = 0x8040;  // MXCSR: FTZ for results, DAZ for operands
  static Control control() { return _mm_getcsr(); }
  static void set_control(Control value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Control = uint64_t;
  static constexpr Control kFlush = uint64_t{1} << 24;  // FPCR: FZ, for both
  static Control control() {
    Control value;
    asm volatile("mrs %0, fpcr" : "=r"(value)::"memory");
    return value;
  }
  static void set_control(Control value) { asm volatile("msr fpcr, %0" ::"r"(value) : "memory"); }
#else
  using Control = uint32_t;
  static constexpr Control kFlush = 0;
  static Control control() { return 0; }
  static void set_control(Control) {}
#endif

  Control before_;
};

}  // namespace selective_scan::cpu
