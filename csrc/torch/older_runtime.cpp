// Defines the symbols that headers of newer GCC and glibc expect in their shared libraries, so that
// a library built on a new system loads on an old one: glibc 2.28 and the libstdc++ of GCC 8.
//
// exports.map keeps these definitions private to the library. The rest of libstdc++ must stay the
// process's own, not a second, static copy: exceptions pass through PyTorch, and each copy counts
// them separately.
#if defined(__linux__)
#define _GLIBCXX_EXTERN_TEMPLATE 0  // else libstdc++.so must have the members below

#include <new>
#include <sstream>

#if defined(__GLIBC__)
/// Tells shared pointers that they may count without atomic operations. Here it is always false.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;
#endif

#if defined(__GLIBCXX__)
namespace std {

// Weak, because a compiler that links libstdc++ into every library may bring its own definition.
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
