use super::encode::{write_int, write_uint};
use super::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn numbers_are_read_as_they_were_written(number: i64, size: u64) {
        let mut bytes = Vec::new();
        write_int(&mut bytes, number);
        write_uint(&mut bytes, size);
        let mut input = Input(&bytes);
        prop_assert_eq!((input.int().unwrap(), input.uint().unwrap()), (number, size));
        prop_assert!(input.0.is_empty());
    }

    #[test]
    fn any_bytes_are_read_or_refused(mut bytes: Vec<u8>) {
        let mut reader = Reader::default();
        let before = bytes.len();
        let _ = reader.take(&mut bytes);
        prop_assert!(bytes.len() <= before);
    }

    #[test]
    fn a_damaged_call_is_read_or_refused(at in 40..400_usize, byte: u8) {
        let mut bytes = include_bytes!("../../testdata/allocate-daemon")[34..].to_vec();
        let at = at % bytes.len();
        bytes[at] = byte;
        let mut reader = Reader::default();
        while let Ok(Some(_)) = reader.take(&mut bytes) {}
    }
}

#[test]
fn hostile_numbers_and_types_are_refused() {
    let read = |bytes: &[u8]| Reader::default().take(&mut bytes.to_vec());
    assert_eq!(read(&[]), Ok(None));
    assert_eq!(read(&[0xfe, 1]), Ok(None), "half of a length");
    assert!(read(&[0x80; 300]).is_err(), "a length of 128 bytes");
    assert!(read(&[0xf8, 255, 255, 255, 255, 255, 255, 255, 255]).is_err(), "a length of all there is");
    // A list of itself, without end.
    let mut bytes = Vec::new();
    write_definition(&mut bytes, 65, "x", Definition::List(65));
    bytes.extend([70, 0xff, 130, 0]);
    bytes.extend([1; 67]);
    assert!(Reader::default().take(&mut bytes).is_err());
}
