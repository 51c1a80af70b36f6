//! The agent's own question to a pod's network namespace: would a new connection be redirected?

pub mod answer;

pub use answer::Answer;
