# CMake package of xserv: find_package(xserv) defines the imported targets
#
#     xserv::xserv    the shared library
#     xserv::static   the static library, where libxserv.a is there; the component "static" makes sure of it:
#                     find_package(xserv COMPONENTS static)
#
# The same file serves the install tree, where it lies in <libdir>/cmake/xserv, and the repository,
# where it lies in csrc/packaging and takes the libraries from target/release. It holds no absolute
# path, so an install tree can be moved.

get_filename_component(_xserv_repository "${CMAKE_CURRENT_LIST_DIR}/../.." ABSOLUTE)
if(EXISTS "${_xserv_repository}/Cargo.toml")
  set(XSERV_LIBDIR "${_xserv_repository}/target/release" CACHE PATH "Folder of the libxserv.so to use")
  set(_xserv_libdir "${XSERV_LIBDIR}")
  set(_xserv_include "${_xserv_repository}/include")
  set(_xserv_hint "build it first: cargo build --release")
  # Cargo names the file after the crate alone; programs ask for it by its SONAME.
  if(EXISTS "${_xserv_libdir}/libxserv.so" AND NOT EXISTS "${_xserv_libdir}/libxserv.so.1")
    # RESULT: it is no error if another configuration makes the link at the same time.
    file(CREATE_LINK libxserv.so "${_xserv_libdir}/libxserv.so.1" RESULT _xserv_ignored SYMBOLIC)
  endif()
else()
  # Links resolved: /lib may be one to /usr/lib, whose include is not /include.
  get_filename_component(_xserv_libdir "${CMAKE_CURRENT_LIST_DIR}/../.." REALPATH)
  # The library's folder is <prefix>/lib, or one level deeper as in <prefix>/lib/x86_64-linux-gnu.
  get_filename_component(_xserv_include "${_xserv_libdir}/../include" ABSOLUTE)
  if(NOT EXISTS "${_xserv_include}/xserv.h")
    get_filename_component(_xserv_include "${_xserv_libdir}/../../include" ABSOLUTE)
  endif()
  set(_xserv_hint "the install tree is not complete")
endif()

if(EXISTS "${_xserv_libdir}/libxserv.so" AND EXISTS "${_xserv_include}/xserv.h")
  include("${CMAKE_CURRENT_LIST_DIR}/xservTargets.cmake")
  if(NOT TARGET xserv::xserv)
    add_library(xserv::xserv SHARED IMPORTED)
    set_target_properties(xserv::xserv PROPERTIES
      IMPORTED_LOCATION "${_xserv_libdir}/libxserv.so"
      IMPORTED_SONAME "libxserv.so.1")
    xserv_describe_shared(xserv::xserv "${_xserv_include}")
  endif()
  set(xserv_shared_FOUND TRUE)
  if(EXISTS "${_xserv_libdir}/libxserv.a")
    if(NOT TARGET xserv::static)
      add_library(xserv::static STATIC IMPORTED)
      set_target_properties(xserv::static PROPERTIES IMPORTED_LOCATION "${_xserv_libdir}/libxserv.a")
      xserv_describe_static(xserv::static "${_xserv_include}")
    endif()
    set(xserv_static_FOUND TRUE)
  elseif(NOT xserv_FIND_QUIETLY)
    message(STATUS "xserv::static is not defined: no libxserv.a in ${_xserv_libdir} (csrc/packaging/static makes it)")
  endif()
  foreach(_xserv_component ${xserv_FIND_COMPONENTS})
    if(NOT xserv_${_xserv_component}_FOUND AND xserv_FIND_REQUIRED_${_xserv_component})
      set(xserv_FOUND FALSE)
      if(_xserv_component STREQUAL "static")
        set(xserv_NOT_FOUND_MESSAGE "no libxserv.a in ${_xserv_libdir}: csrc/packaging/static makes it")
      else()
        set(xserv_NOT_FOUND_MESSAGE "xserv has no component ${_xserv_component}: it has shared and static")
      endif()
    endif()
  endforeach()
else()
  set(xserv_FOUND FALSE)
  set(xserv_NOT_FOUND_MESSAGE "no libxserv.so in ${_xserv_libdir}: ${_xserv_hint}")
endif()

unset(_xserv_repository)
unset(_xserv_libdir)
unset(_xserv_include)
unset(_xserv_hint)
unset(_xserv_ignored)
unset(_xserv_component)
