//! Rules that recorded traces do not reach, the model, and what happens when the driver fails.

mod model;
mod random;
mod rules;
