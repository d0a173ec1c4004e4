#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cni_fuzz::links::run(data));
