# The version for find_package(xserv VERSION): read from xserv.h, which lies in <repository>/include,
# <prefix>/include beside lib, or one level higher. While the major version is 0, a program that asks
# for 0.N gets 0.N only; from 1 on, any later version of the same major one.

foreach(_xserv_header ../../include ../../../include ../../../../include)
  set(_xserv_header "${CMAKE_CURRENT_LIST_DIR}/${_xserv_header}/xserv.h")
  if(EXISTS "${_xserv_header}")
    file(STRINGS "${_xserv_header}" _xserv_lines REGEX "^#define XSERV_VERSION_")
    string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*PATCH ([0-9]+).*" "\\1.\\2.\\3"
      PACKAGE_VERSION "${_xserv_lines}")
    string(REGEX MATCH "^0\\.[0-9]+|^[1-9][0-9]*" _xserv_series "${PACKAGE_VERSION}")
    break()
  endif()
endforeach()

set(PACKAGE_VERSION_COMPATIBLE FALSE)
set(PACKAGE_VERSION_EXACT FALSE)
if(NOT PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION
    AND "${PACKAGE_FIND_VERSION}." MATCHES "^${_xserv_series}\\.")
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
if(PACKAGE_FIND_VERSION STREQUAL PACKAGE_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
# A build for another pointer size can't be linked.
if(CMAKE_SIZEOF_VOID_P AND NOT CMAKE_SIZEOF_VOID_P EQUAL 8)
  set(PACKAGE_VERSION_UNSUITABLE TRUE)
endif()
