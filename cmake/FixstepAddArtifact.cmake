# Compiles a Python program to an artifact when the project is built.
#
#   fixstep_add_artifact(<target> PROGRAM <module:name> OUTPUT <file>
#                        [TARGETS <target>...] [WORKING_DIRECTORY <folder>] [DEPENDS <file>...] [EMBED <symbol>])
#
# Adds a target that makes <file>. TARGETS are those of `fixstep compile`; the default is cpu. WORKING_DIRECTORY is where
# Python finds the module. With EMBED the target is an object library that holds the artifact as
# `extern const unsigned char <symbol>[]` and `extern const size_t <symbol>_byte_length`, for
# fixstep_artifact_open_memory. The program `fixstep` has to be on the PATH, or FIXSTEP_COMMAND to name it.
function(fixstep_add_artifact target)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "" "PROGRAM;OUTPUT;WORKING_DIRECTORY;EMBED" "TARGETS;DEPENDS")
  if(NOT ARG_PROGRAM OR NOT ARG_OUTPUT OR ARG_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "fixstep_add_artifact: expected PROGRAM and OUTPUT, got ${ARGN}")
  endif()
  find_program(FIXSTEP_COMMAND fixstep DOC "The command line of fixstep, with its compiler")
  if(NOT FIXSTEP_COMMAND)
    message(FATAL_ERROR "fixstep_add_artifact: no program fixstep on the PATH; pip install 'fixstep[compile]', or set "
                        "FIXSTEP_COMMAND")
  endif()
  if(NOT ARG_TARGETS)
    set(ARG_TARGETS cpu)
  endif()
  if(NOT ARG_WORKING_DIRECTORY)
    set(ARG_WORKING_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}")
  endif()
  get_filename_component(output "${ARG_OUTPUT}" ABSOLUTE BASE_DIR "${CMAKE_CURRENT_BINARY_DIR}")
  list(TRANSFORM ARG_TARGETS PREPEND "--target=")
  add_custom_command(
    OUTPUT "${output}"
    COMMAND "${FIXSTEP_COMMAND}" compile "${ARG_PROGRAM}" ${ARG_TARGETS} -o "${output}"
    WORKING_DIRECTORY "${ARG_WORKING_DIRECTORY}"
    DEPENDS ${ARG_DEPENDS}
    COMMENT "Compiling ${ARG_PROGRAM}"
    VERBATIM)
  if(NOT ARG_EMBED)
    add_custom_target(${target} ALL DEPENDS "${output}")
    return()
  endif()
  set(source "${CMAKE_CURRENT_BINARY_DIR}/${ARG_EMBED}.c")
  file(CONFIGURE OUTPUT "${source}" @ONLY CONTENT [=[
#include <stddef.h>
#if defined(__APPLE__)
#define SECTION ".const_data\n"
#define SYMBOL(name) "_" #name
#else
#define SECTION ".section .rodata\n"
#define SYMBOL(name) #name
#endif
__asm__(SECTION ".balign 64\n.globl " SYMBOL(@ARG_EMBED@) "\n" SYMBOL(@ARG_EMBED@) ":\n"
        ".incbin \"@output@\"\n"
        ".globl " SYMBOL(@ARG_EMBED@_end) "\n" SYMBOL(@ARG_EMBED@_end) ":\n.byte 0\n.balign 8\n"
        ".globl " SYMBOL(@ARG_EMBED@_byte_length) "\n" SYMBOL(@ARG_EMBED@_byte_length) ":\n"
        ".quad " SYMBOL(@ARG_EMBED@_end) " - " SYMBOL(@ARG_EMBED@) "\n.text\n");
]=])
  set_source_files_properties("${source}" PROPERTIES OBJECT_DEPENDS "${output}" C_EXTENSIONS ON)
  add_library(${target} OBJECT "${source}")
endfunction()
