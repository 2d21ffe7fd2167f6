// What headers of newer GCC and glibc ask of their shared libraries, defined here instead, so that
// a library built on a new system loads on an old one: one with glibc 2.28 and the libstdc++ of
// GCC 8.
//
// exports.map keeps these definitions to the library. The rest of libstdc++ stays the process's
// own, which a second, static copy would not: exceptions pass through PyTorch, and each copy counts
// them.
#if defined(__linux__)
#define _GLIBCXX_EXTERN_TEMPLATE 0  // else the members below are those of libstdc++.so

#include <new>
#include <sstream>

#if defined(__GLIBC__)
/// Tells shared pointers that they may count without atomic operations: here they may never.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;
#endif

#if defined(__GLIBCXX__)
namespace std {

// Weak, since a compiler that links libstdc++ into every library may bring another one.
__attribute__((weak)) void __throw_bad_array_new_length() {
  throw bad_array_new_length();
}

template basic_stringstream<char>::basic_stringstream();
template basic_ostringstream<char>::basic_ostringstream();
#if __cplusplus >= 202002L
template string basic_stringbuf<char>::str() const&;
template string basic_stringbuf<char>::str() &&;
#endif

}  // namespace std
#endif
#endif
