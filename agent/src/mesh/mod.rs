//! Meshes as data: how each marks its pods, what it redirects, what it lets out.

pub mod exempt;
mod grammar;
mod linkerd;
mod merge;
pub mod profile;
pub mod recognise;
mod wanted;

pub use exempt::{Exemptions, Problem};
pub use grammar::PortRange;
pub use profile::{Profile, ProfileError, Profiles};
pub use recognise::{Membership, Meshed, recognise};
