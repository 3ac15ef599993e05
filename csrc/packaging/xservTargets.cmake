# The libraries that programs need beside xserv's own: for xservConfig.cmake and csrc/packaging/CMakeLists.txt.
cmake_policy(VERSION 3.16...4.0)

function(_xserv_describe target include)
  set_target_properties(${target} PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${include}")
  # xserv.hpp is C++17; xserv.h is not, and is all that many programs include. So a target that chooses its
  # C++ standard keeps it, one that leaves it to the compiler gets at least 17, and a project without C++ is
  # asked for nothing.
  get_property(languages GLOBAL PROPERTY ENABLED_LANGUAGES)
  if("CXX" IN_LIST languages)
    set_target_properties(${target} PROPERTIES
      INTERFACE_COMPILE_FEATURES "$<$<STREQUAL:$<TARGET_PROPERTY:CXX_STANDARD>,>:cxx_std_17>")
  endif()
endfunction()

function(xserv_describe_shared target include)
  _xserv_describe(${target} "${include}")
endfunction()

# A plugin that contains the library can't be unloaded, as its threads and thread-local destructors may still
# run, and does not export its functions.
function(xserv_describe_static target include)
  _xserv_describe(${target} "${include}")
  set_target_properties(${target} PROPERTIES
    IMPORTED_LINK_INTERFACE_LANGUAGES C
    INTERFACE_LINK_LIBRARIES "m;dl;pthread"
    INTERFACE_LINK_OPTIONS "LINKER:-z,nodelete;LINKER:--exclude-libs,libxserv.a")
endfunction()
