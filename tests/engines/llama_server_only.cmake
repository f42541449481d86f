# Included by llama.cpp's project. It leaves out the tools that llama-server does not need and
# compiles HTTP, JSON and chat templates with fewer optimisations. The code that computes tokens
# keeps its own.
function(build_llama_server_only)
    get_property(folders DIRECTORY tools PROPERTY SUBDIRECTORIES)
    foreach(folder IN LISTS folders)
        if(NOT folder MATCHES "/(server|ui)$")
            get_property(targets DIRECTORY ${folder} PROPERTY BUILDSYSTEM_TARGETS)
            list(REMOVE_ITEM targets mtmd)
            set_target_properties(${targets} PROPERTIES EXCLUDE_FROM_ALL ON)
        endif()
    endforeach()
    foreach(target IN ITEMS cpp-httplib llama-common mtmd server-context llama-server-impl)
        target_compile_options(${target} PRIVATE -O1)
    endforeach()
    # These two files refuse the headers that the other files of mtmd include.
    set_source_files_properties(
        ${CMAKE_SOURCE_DIR}/tools/mtmd/mtmd-helper.cpp
        ${CMAKE_SOURCE_DIR}/tools/mtmd/mtmd-helper-gen.cpp
        DIRECTORY ${CMAKE_SOURCE_DIR}/tools/mtmd
        PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()
cmake_language(DEFER DIRECTORY ${CMAKE_SOURCE_DIR} CALL build_llama_server_only)
