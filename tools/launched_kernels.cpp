// Appends the names of this library's kernels that a process launches, each once, to the file that
// LAUNCHED_KERNELS names. The CUDA driver loads it into every process with CUDA_INJECTION64_PATH.

#include <cupti.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_set>

namespace {

/// Appends a name to the file by a single write, since several processes share the file.
void note(const char* name) {
  static std::mutex mutex;
  static std::unordered_set<std::string> names;
  static const int file =
      open(std::getenv("LAUNCHED_KERNELS"), O_WRONLY | O_APPEND | O_CREAT, 0644);
  const std::lock_guard lock(mutex);
  if (!names.emplace(name).second) return;
  const std::string line = std::string(name) + '\n';
  if (write(file, line.data(), line.size()) != static_cast<ssize_t>(line.size())) std::abort();
}

void CUPTIAPI look(void*, CUpti_CallbackDomain, CUpti_CallbackId, const void* data) {
  const auto& call = *static_cast<const CUpti_CallbackData*>(data);
  const char* const name = call.symbolName;  // null unless the call is a launch
  if (call.callbackSite == CUPTI_API_ENTER && name != nullptr &&
      std::strstr(name, "selective_scan") != nullptr) {
    note(name);
  }
}

}  // namespace

extern "C" int InitializeInjection() {
  CUpti_SubscriberHandle subscriber;
  const bool sees = cuptiSubscribe(&subscriber, look, nullptr) == CUPTI_SUCCESS &&
                    cuptiEnableDomain(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API) == CUPTI_SUCCESS;
  if (!sees) std::abort();
  return 1;
}
