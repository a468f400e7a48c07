# FLASHMHF_MANYLINUX=ON: the library runs with glibc 2.28 and GCC 8's libstdc++ (manylinux_2_28), although it is built on a newer system.
#  - glibc 2.34 moved libpthread, libdl and librt into libc and gave their functions a new version. The linker gets stand-ins for the old
#    libraries, whose functions have the first version; every newer glibc still provides those.
#  - libstdc++ gains functions with newer releases of GCC: parts of strings and string streams, __throw_bad_array_new_length. The library
#    holds its own. <iostream> of GCC 13 refers to a function that says that libstdc++ prepares the streams; an older one does so for
#    every library that has an ios_base::Init, and this one has.
#  - libstdc++'s headers read __libc_single_threaded, which glibc has since 2.32. A hidden variable of that name says "many threads".
#  - A version script exports nothing: the library registers its operators when it is loaded.
# tools/build_wheel.py has auditwheel check the result.
if(CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  set(FIRST_GLIBC GLIBC_2.2.5)
  set(DLMOPEN_GLIBC GLIBC_2.3.4)
else()
  set(FIRST_GLIBC GLIBC_2.17) # aarch64
  set(DLMOPEN_GLIBC GLIBC_2.17)
endif()
set(GLIBC_FOLDER ${CMAKE_CURRENT_BINARY_DIR}/glibc)

# A stand-in for lib<name>.so.<major> of glibc 2.28 that has the functions in ARGN; never installed.
function(glibc_stand_in name major)
  set(source "extern \"C\" {\n")
  set(first "")
  set(dlmopen "")
  foreach(symbol ${ARGN})
    string(APPEND source "void ${symbol}() {}\n")
    if(symbol STREQUAL "dlmopen" AND NOT DLMOPEN_GLIBC STREQUAL FIRST_GLIBC)
      set(dlmopen "${DLMOPEN_GLIBC} { global: dlmopen; };\n")
    else()
      string(APPEND first " ${symbol};")
    endif()
  endforeach()
  file(WRITE ${GLIBC_FOLDER}/${name}.cpp "${source}}\n")
  file(WRITE ${GLIBC_FOLDER}/${name}.map "${FIRST_GLIBC} { global:${first} local: *; };\n${dlmopen}")
  add_library(glibc_${name} SHARED ${GLIBC_FOLDER}/${name}.cpp)
  set_target_properties(glibc_${name} PROPERTIES
    OUTPUT_NAME ${name} VERSION ${major} SOVERSION ${major} LIBRARY_OUTPUT_DIRECTORY ${GLIBC_FOLDER} LINKER_LANGUAGE CXX)
  target_compile_options(glibc_${name} PRIVATE -fno-builtin -w)
  target_link_options(glibc_${name} PRIVATE -nostdlib -Wl,--version-script=${GLIBC_FOLDER}/${name}.map)
endfunction()

function(link_for_manylinux target)
  glibc_stand_in(dl 2 dlclose dlerror dlmopen dlopen dlsym dlvsym)
  glibc_stand_in(rt 1 shm_open shm_unlink)
  glibc_stand_in(pthread 0
    pthread_condattr_setpshared pthread_create pthread_detach pthread_getspecific pthread_join pthread_key_create pthread_key_delete
    pthread_kill pthread_mutex_trylock pthread_mutexattr_destroy pthread_mutexattr_init pthread_mutexattr_setpshared
    pthread_mutexattr_settype pthread_once pthread_rwlock_destroy pthread_rwlock_init pthread_rwlock_rdlock pthread_rwlock_timedrdlock
    pthread_rwlock_timedwrlock pthread_rwlock_tryrdlock pthread_rwlock_trywrlock pthread_rwlock_unlock pthread_rwlock_wrlock
    pthread_rwlockattr_destroy pthread_rwlockattr_init pthread_rwlockattr_setpshared pthread_setspecific pthread_spin_destroy
    pthread_spin_init pthread_spin_lock pthread_spin_trylock pthread_spin_unlock sem_destroy sem_init sem_post sem_timedwait sem_trywait
    sem_wait)
  file(WRITE ${GLIBC_FOLDER}/libstdcxx.cpp
"#include <ios>
#include <new>
#include <sstream>
#include <string>
static std::ios_base::Init streams;
template class std::basic_string<char>;
template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;
namespace std { void __throw_bad_array_new_length() { throw bad_array_new_length(); } }
extern \"C\" {
__attribute__((visibility(\"hidden\"))) char __libc_single_threaded = 0;
__attribute__((visibility(\"hidden\"))) void _ZSt21ios_base_library_initv() {}
}
")
  file(WRITE ${GLIBC_FOLDER}/exports.map "{ local: *; };\n")
  target_sources(${target} PRIVATE ${GLIBC_FOLDER}/libstdcxx.cpp)
  target_link_options(${target} PRIVATE -Wl,--version-script=${GLIBC_FOLDER}/exports.map)
  target_link_libraries(${target} PRIVATE glibc_pthread glibc_dl glibc_rt)
endfunction()
