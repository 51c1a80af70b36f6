//! The nobypass binary: see `nobypass --help`.

use nobypass::cli::{self, exit::Exit};

fn main() -> Exit {
    cli::main()
}
