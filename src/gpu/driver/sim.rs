//! A GPU in host memory.
