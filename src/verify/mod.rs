//! Files of an environment against what their packages say.
