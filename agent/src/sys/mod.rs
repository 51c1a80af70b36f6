//! Every direct system call and every `unsafe` of the agent.

pub mod file;
