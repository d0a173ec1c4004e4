//! Stores which addresses are occupied, in a tree of 64-bit words, so that a few reads find the
//! next free address.
//!
//! In a word of level 0, each bit stands for an address: it is set if the address is occupied. In a
//! word of level n+1, each bit stands for a word of level n: it is set if all 64 bits of that word
//! are set. Words that are 0 are not stored, so a large free range needs no space.

use super::table::{Key, PAYLOAD_LENGTH, Table, TableError};

/// The tag of a word of level 0; level n has this plus n.
pub(crate) const WORD: u8 = 16;
/// How many bits of an address select the bit of a word: a word has 2^6 bits.
const BITS_PER_LEVEL: u32 = 6;

/// The family of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    V4,
    V6,
}

impl Family {
    /// Returns 4 or 6, as in the file of the index.
    pub(crate) fn number(self) -> u8 {
        match self {
            Family::V4 => 4,
            Family::V6 => 6,
        }
    }

    /// Returns the number of bits of an address.
    fn width(self) -> u32 {
        match self {
            Family::V4 => 32,
            Family::V6 => 128,
        }
    }

    /// Returns the highest address.
    fn max(self) -> u128 {
        match self {
            Family::V4 => u128::from(u32::MAX),
            Family::V6 => u128::MAX,
        }
    }
}

/// Returns the key of a word in the table. `number` counts the words of a level from 0.
fn key(family: Family, level: u32, number: u128) -> Key {
    Key { tag: WORD + level as u8, family: family.number(), rank: 0, number }
}

/// Shifts right. Returns 0 for a shift by 128 bits or more.
fn shr(number: u128, bits: u32) -> u128 {
    number.checked_shr(bits).unwrap_or(0)
}

/// Whether a tree of this family has this level.
fn has_level(family: Family, level: u32) -> bool {
    level * BITS_PER_LEVEL < family.width()
}

/// Returns the position of an address in a level: the word's number, and the bit in the word.
fn position(address: u128, level: u32) -> (u128, u32) {
    let bits_below = level * BITS_PER_LEVEL;
    (shr(address, bits_below + BITS_PER_LEVEL), (shr(address, bits_below) & 63) as u32)
}

/// Reads a word. A word that is not stored is 0.
fn word(table: &Table, family: Family, level: u32, number: u128) -> Result<u64, TableError> {
    let Some(payload) = table.get(&key(family, level, number))? else { return Ok(0) };
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&payload[..8]);
    Ok(u64::from_le_bytes(bytes))
}

/// Stores a word, or removes it if it is 0.
fn set_word(table: &mut Table, family: Family, level: u32, number: u128, word: u64) -> Result<(), TableError> {
    let key = key(family, level, number);
    if word == 0 {
        return table.remove(&key);
    }
    let mut payload = [0; PAYLOAD_LENGTH];
    payload[..8].copy_from_slice(&word.to_le_bytes());
    table.put(&key, &payload)
}

/// Marks an address as occupied.
pub(crate) fn occupy(table: &mut Table, family: Family, address: u128) -> Result<(), TableError> {
    let mut level = 0;
    while has_level(family, level) {
        let (number, bit) = position(address, level);
        let before = word(table, family, level, number)?;
        let after = before | 1 << bit;
        if after != before {
            set_word(table, family, level, number, after)?;
        }
        // The bit in the level above changes only if this word has just become full.
        let has_become_full = after == u64::MAX && before != u64::MAX;
        if !has_become_full {
            break;
        }
        level += 1;
    }
    Ok(())
}

/// Marks an address as free.
pub(crate) fn vacate(table: &mut Table, family: Family, address: u128) -> Result<(), TableError> {
    let mut level = 0;
    while has_level(family, level) {
        let (number, bit) = position(address, level);
        let before = word(table, family, level, number)?;
        let after = before & !(1 << bit);
        if after != before {
            set_word(table, family, level, number, after)?;
        }
        // The bit in the level above is set only if this word was full.
        let was_full = before == u64::MAX;
        if !was_full {
            break;
        }
        level += 1;
    }
    Ok(())
}

/// Whether an address is occupied, for the tests.
#[cfg(test)]
fn is_occupied(table: &Table, family: Family, address: u128) -> Result<bool, TableError> {
    let (number, bit) = position(address, 0);
    Ok(word(table, family, 0, number)? & 1 << bit != 0)
}

/// Returns the lowest free address that is `from` or higher. Returns `None` if all addresses up to
/// the end of the family are occupied.
///
/// Goes up the levels until a word has an unset bit, and from there down to the address.
pub(crate) fn next_free(table: &Table, family: Family, from: u128) -> Result<Option<u128>, TableError> {
    let (mut level, mut start) = (0, from);
    while has_level(family, level) {
        let (number, bit) = position(start, level);
        let unset_bits = !word(table, family, level, number)? & (u64::MAX << bit);
        if unset_bits == 0 {
            // All addresses from `start` to the end of this word are occupied. Continue one level
            // up, with the first address of the next word.
            let addresses_per_word = 1_u128.checked_shl((level + 1) * BITS_PER_LEVEL);
            let next_word_start = addresses_per_word.and_then(|addresses| (number + 1).checked_mul(addresses));
            let Some(next) = next_word_start.filter(|next| *next <= family.max()) else { return Ok(None) };
            (level, start) = (level + 1, next);
            continue;
        }
        // `found` is the first address, or in level 0 the only one, that this bit stands for.
        let lowest_unset = u128::from(unset_bits.trailing_zeros());
        let found = (number << BITS_PER_LEVEL | lowest_unset) << (level * BITS_PER_LEVEL);
        // The last word of a level may extend beyond the family's last address.
        if found > family.max() {
            return Ok(None);
        }
        if level == 0 {
            return Ok(Some(found));
        }
        // Continue one level down, in the word of this bit: it is not full, so it has an unset bit.
        (level, start) = (level - 1, found);
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn expected(model: &BTreeSet<u128>, family: Family, from: u128) -> Option<u128> {
        let mut at = from;
        for taken in model.range(from..) {
            if *taken != at {
                break;
            }
            at = taken.checked_add(1).filter(|next| *next <= family.max())?;
        }
        Some(at)
    }

    fn against_model(family: Family, base: u128, steps: &[(u16, bool)]) {
        let mut table = Table::in_memory(30_000);
        let mut model = BTreeSet::new();
        // Most of it occupied, so that words fill up and empty again.
        for offset in 0..5000 {
            if let Some(address) = base.checked_add(offset).filter(|address| *address <= family.max()) {
                occupy(&mut table, family, address).unwrap();
                model.insert(address);
            }
        }
        for (offset, add) in steps {
            let Some(address) = base.checked_add(u128::from(*offset)).filter(|a| *a <= family.max()) else { continue };
            if *add {
                occupy(&mut table, family, address).unwrap();
                model.insert(address);
            } else {
                vacate(&mut table, family, address).unwrap();
                model.remove(&address);
            }
            assert_eq!(is_occupied(&table, family, address).unwrap(), *add);
            for from in [base, address, address.saturating_sub(70), address / 2] {
                assert_eq!(next_free(&table, family, from).unwrap(), expected(&model, family, from), "from {from}");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn the_tree_agrees_with_a_set(steps in prop::collection::vec((0u16..6000, any::<bool>()), 0..60)) {
            against_model(Family::V4, 0x0a00_0000, &steps);
            against_model(Family::V4, u128::from(u32::MAX) - 5500, &steps);
            against_model(Family::V6, 0xfd00 << 112, &steps);
            against_model(Family::V6, u128::MAX - 5500, &steps);
        }
    }

    #[test]
    fn the_next_free_address_costs_the_same_in_a_full_network() {
        let mut table = Table::in_memory(300_000);
        let base = 0x0a00_0000;
        for address in base..base + (1 << 18) - 1 {
            occupy(&mut table, Family::V4, address).unwrap();
        }
        let before = table.accesses();
        assert_eq!(next_free(&table, Family::V4, base).unwrap(), Some(base + (1 << 18) - 1));
        let cost = table.accesses() - before;
        assert!(cost <= 16, "{cost} accesses for one free address among 262,144");
    }
}
