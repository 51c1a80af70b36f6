//! From evidence to words: verdicts of pods, reports of bypasses.

pub mod evidence;
pub mod recent;
pub mod report;
pub mod state;
pub mod tracker;
pub mod verdict;

pub use evidence::{Evidence, Family, Reason};
pub use state::{FamilyState, PodState, PodStates};
pub use tracker::{Finding, Tracker};
