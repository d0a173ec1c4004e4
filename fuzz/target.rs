//! The program of every target, whose name is that of the program.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cni_fuzz::run(env!("CARGO_BIN_NAME"), data));
