//! Writes the man page and the completions of `cni-install` into a folder, for the archives.
//!
//! This is not a command of the program itself, which must stay small.

use std::fs;
use std::path::PathBuf;

use clap_complete::Shell;

fn main() -> std::io::Result<()> {
    let folder = PathBuf::from(std::env::args_os().nth(1).unwrap_or_else(|| ".".into()));
    fs::create_dir_all(&folder)?;
    for shell in [Shell::Bash, Shell::Fish, Shell::Zsh] {
        clap_complete::generate_to(shell, &mut cni_install::command(), "cni-install", &folder)?;
    }
    clap_mangen::generate_to(cni_install::command(), folder)
}
