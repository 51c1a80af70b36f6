//! From evidence to words: verdicts of pods, reports of bypasses.

pub mod report;
pub mod verdict;
