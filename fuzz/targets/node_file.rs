#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cni_fuzz::node_file::run(data));
