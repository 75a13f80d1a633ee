# SPDX-License-Identifier: Apache-2.0
# cmake --install BUILD --prefix P --component C: what each part of kvstrata is to others.
#   library  libkvstrata.so.N, which an engine links; needs libc alone
#   remote   libkvstrata_remote.so.N, the same ABI over gRPC, for tools
#   devel    headers, kvstrata.pc, find_package(kvstrata), for both libraries
#   daemon   kvstratad, kvstrata, their completions and manual pages, parameters, configuration, systemd's unit and its user
#   cuda     libkvstrata_cuda.so, beside the library, and what it needs of the unit
include(CMakePackageConfigHelpers)

set(kvs_cmake_folder ${CMAKE_INSTALL_LIBDIR}/cmake/kvstrata)
set(kvs_abi_libraries kvstrata)
if(TARGET kvstrata_remote)
  list(APPEND kvs_abi_libraries kvstrata_remote)
  set_target_properties(kvstrata_remote PROPERTIES EXPORT_NAME remote)
endif()
foreach(target ${kvs_abi_libraries})
  set(component library)
  if(target STREQUAL kvstrata_remote)
    set(component remote)
  endif()
  # An export each, so that a machine without the one still finds the other.
  install(TARGETS ${target} EXPORT ${target} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    COMPONENT ${component} NAMELINK_COMPONENT devel)
  install(EXPORT ${target} NAMESPACE kvstrata:: FILE ${target}Targets.cmake DESTINATION ${kvs_cmake_folder}
    COMPONENT devel)
endforeach()

install(DIRECTORY ${CMAKE_SOURCE_DIR}/client/include/kvstrata DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT devel)
configure_file(${CMAKE_CURRENT_LIST_DIR}/kvstrataConfig.cmake.in kvstrataConfig.cmake COPYONLY)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/kvstrataConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/kvstrataConfig.cmake ${CMAKE_BINARY_DIR}/kvstrataConfigVersion.cmake
  DESTINATION ${kvs_cmake_folder} COMPONENT devel)

# Found by where it lies, so that a prefix may be chosen when it is installed, or moved.
file(RELATIVE_PATH KVS_PC_PREFIX /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
configure_file(${CMAKE_CURRENT_LIST_DIR}/kvstrata.pc.in kvstrata.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/kvstrata.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT devel)

if(KVS_SERVER)
  install(TARGETS kvstratad kvstrata_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT daemon)
  # /etc, below no prefix: where the daemon looks.
  install(FILES ${CMAKE_SOURCE_DIR}/deploy/kvstratad.toml DESTINATION /etc/kvstrata COMPONENT daemon)
  install(FILES ${CMAKE_SOURCE_DIR}/deploy/systemd/kvstratad.service DESTINATION lib/systemd/system COMPONENT daemon)
  install(FILES ${CMAKE_SOURCE_DIR}/deploy/systemd/kvstrata.sysusers DESTINATION lib/sysusers.d
    RENAME kvstrata.conf COMPONENT daemon)
  # The agent of Mooncake and trained parameters, where the daemon finds them.
  install(FILES ${CMAKE_SOURCE_DIR}/integrations/mooncake_agent/agent.py
    DESTINATION ${CMAKE_INSTALL_DATADIR}/kvstrata/mooncake_agent COMPONENT daemon)
  install(DIRECTORY ${CMAKE_SOURCE_DIR}/parameters/ DESTINATION ${CMAKE_INSTALL_DATADIR}/kvstrata/parameters
    COMPONENT daemon FILES_MATCHING PATTERN "*.safetensors")
  # They come from the programs' own tables of commands and options.
  # bash looks for a file of each program's name; its script completes both.
  foreach(words_and_file "kvstrata_cli completion bash:bash-completion/completions/kvstrata"
      "kvstrata_cli completion bash:bash-completion/completions/kvstratad"
      "kvstrata_cli completion zsh:zsh/vendor-completions/_kvstrata"
      "kvstrata_cli completion fish:fish/vendor_completions.d/kvstrata.fish"
      "kvstrata_cli __reference man:man/man1/kvstrata.1" "kvstratad --manual:man/man1/kvstratad.1")
    string(REPLACE ":" ";" parts ${words_and_file})
    list(GET parts 0 words)
    separate_arguments(words UNIX_COMMAND "${words}")
    list(POP_FRONT words program)
    list(JOIN words " " words)
    list(GET parts 1 file)
    install(CODE "
      set(file \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/share/${file}\")
      message(STATUS \"Installing: \${file}\")
      get_filename_component(folder \"\${file}\" DIRECTORY)
      file(MAKE_DIRECTORY \"\${folder}\")
      execute_process(COMMAND $<TARGET_FILE:${program}> ${words} OUTPUT_FILE \"\${file}\"
        COMMAND_ERROR_IS_FATAL ANY)" COMPONENT daemon)
  endforeach()
endif()
if(TARGET kvstrata_cuda)
  install(TARGETS kvstrata_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cuda)
  install(FILES ${CMAKE_SOURCE_DIR}/deploy/systemd/gpu.conf DESTINATION lib/systemd/system/kvstratad.service.d
    RENAME 10-gpu.conf COMPONENT cuda)
endif()
