#include "capability.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace selective_scan::cpu {

namespace {

bool processor_has(const Capability& capability) {
  const std::string name = capability.name;
  if (name == "default") return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (name == "avx2") return has_avx2;
  return has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

/// In order, from the best to the one that every processor supports.
const Capability* const kCapabilities[] = {
#if defined(__x86_64__)
    &kAvx512Capability,
    &kAvx2Capability,
#endif
    &kDefaultCapability,
};

const Capability& choose_capability() {
  const char* wanted = std::getenv("SELECTIVE_SCAN_CPU_CAPABILITY");
  std::string names;
  for (const Capability* capability : kCapabilities) {
    if (!processor_has(*capability)) continue;
    if (wanted == nullptr || *wanted == '\0' || std::string(wanted) == capability->name) {
      return *capability;
    }
    names = capability->name + std::string(names.empty() ? "" : ", ") + names;
  }
  throw std::runtime_error("selective_scan: SELECTIVE_SCAN_CPU_CAPABILITY must be one of " + names +
                           " on this processor, got '" + wanted + "'");
}

const Capability& chosen_capability() {
  static const Capability& capability = choose_capability();
  return capability;
}

}  // namespace

const KernelTable& chosen_kernels(bool is_double) {
  return *chosen_capability().tables[is_double];
}

const char* capability() {
  return chosen_capability().name;
}

}  // namespace selective_scan::cpu
