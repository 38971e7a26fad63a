# The libraries that libfixstep stands on. The installed package reads this file too.
find_package(PkgConfig REQUIRED)
pkg_check_modules(FIXSTEP_JANSSON REQUIRED IMPORTED_TARGET GLOBAL jansson>=2.12)
pkg_check_modules(FIXSTEP_SODIUM REQUIRED IMPORTED_TARGET GLOBAL libsodium)
pkg_check_modules(FIXSTEP_MINIZIP REQUIRED IMPORTED_TARGET GLOBAL minizip)
pkg_check_modules(FIXSTEP_ZLIB REQUIRED IMPORTED_TARGET GLOBAL zlib)
