//! Meshes as data: how each marks its pods, what it redirects, what it lets out.

pub mod enrolment;
pub mod exempt;
mod grammar;
pub mod marker;
mod materialised;
pub mod profile;
pub mod profiles;
pub mod recognise;
pub mod role;

pub use exempt::{Exemptions, Listed, Problem};
pub use grammar::{PortRange, UserPorts};
pub use profile::Profile;
pub use profiles::{ProfileError, Profiles};
pub use recognise::{Membership, Meshed, Unsupported, recognise};
pub use role::{MeshRole, Phase};
