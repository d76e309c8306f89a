

pub mod host;
