# The libraries that libfixstep stands on. The installed package reads this file too.
# FIXSTEP_STATIC_DEPENDENCIES takes their archives, for a program without shared libraries.
find_package(PkgConfig REQUIRED)
set(fixstep_saved_suffixes ${CMAKE_FIND_LIBRARY_SUFFIXES})
if(FIXSTEP_STATIC_DEPENDENCIES)
  set(CMAKE_FIND_LIBRARY_SUFFIXES .a)
endif()
pkg_check_modules(FIXSTEP_JANSSON REQUIRED IMPORTED_TARGET GLOBAL jansson>=2.12)
pkg_check_modules(FIXSTEP_SODIUM REQUIRED IMPORTED_TARGET GLOBAL libsodium)
pkg_check_modules(FIXSTEP_MINIZIP REQUIRED IMPORTED_TARGET GLOBAL minizip)
pkg_check_modules(FIXSTEP_ZLIB REQUIRED IMPORTED_TARGET GLOBAL zlib)
set(CMAKE_FIND_LIBRARY_SUFFIXES ${fixstep_saved_suffixes})
