# Read by CMake right after llama.cpp's project() call, through CMAKE_PROJECT_llama.cpp_INCLUDE.
#
# The Python package's own CMakeLists forces LLAMA_BUILD_COMMON on: the helpers of llama.cpp's
# programs, none of which we build, and half of the compile time. A normal variable hides the
# forced cache entry, here and nowhere else. libllama and ggml are untouched by it.
set(LLAMA_BUILD_COMMON OFF)
