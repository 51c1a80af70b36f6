//! Set-up, demo, tests and benchmarks of nobypass: `cargo xtask --help`.
fn main() {}
