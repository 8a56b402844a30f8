"""llama.cpp, compiled for every CPU of this platform, and its binding `uma_trio_llama.llama_cpp`.

Importing the binding loads the library and no backend: call ``ggml_backend_load_all_from_path`` with
the folder `lib` of this package before the first model is loaded.
"""

__version__ = "0.3.36"
