//! The data of a rank for operations that only move bytes.

/// Identifies the data of one rank in one repetition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    key: u64,
}

impl Source {
    /// The data that `rank` sends in `repetition`.
    ///
    /// ```
    /// use nccl_tools::verify::Source;
    /// let (mut sent, source) = ([0u8; 40], Source::new(7, 1));
    /// source.fill(16, &mut sent);
    /// assert_eq!(source.count_wrong(16, &sent, 4), 0);
    /// sent[9] ^= 1;
    /// assert_eq!(source.count_wrong(16, &sent, 4), 1);
    /// ```
    #[must_use]
    pub fn new(repetition: u64, rank: usize) -> Self {
        Self {
            key: mix(mix(repetition.wrapping_add(1)) ^ (rank as u64 + 1)),
        }
    }

    fn word(self, index: u64) -> u64 {
        mix(self
            .key
            .wrapping_add(index.wrapping_mul(0x9E37_79B9_7F4A_7C15)))
    }

    /// Writes the bytes from `start` on, which must be a multiple of 8.
    ///
    /// # Panics
    /// If `start` is not a multiple of 8.
    pub fn fill(self, start: u64, bytes: &mut [u8]) {
        assert_eq!(start % 8, 0, "data is made of 8-byte words");
        let mut index = start / 8;
        let (words, rest) = bytes.as_chunks_mut::<8>();
        for word in words {
            *word = self.word(index).to_le_bytes();
            index += 1;
        }
        let last = self.word(index).to_le_bytes();
        rest.copy_from_slice(&last[..rest.len()]);
    }

    /// How many elements of `element_size` bytes differ from what [`fill`](Self::fill) would write
    /// from `start` on. Bytes beyond the last whole element count as one more.
    ///
    /// # Panics
    /// If `start` is not a multiple of 8.
    #[must_use]
    pub fn count_wrong(self, start: u64, bytes: &[u8], element_size: usize) -> u64 {
        let mut expected = [0u8; 4096];
        let mut wrong = 0;
        for (index, actual) in bytes.chunks(expected.len()).enumerate() {
            let expected = &mut expected[..actual.len()];
            self.fill(start + (index * 4096) as u64, expected);
            if actual != expected {
                let elements = actual
                    .chunks(element_size)
                    .zip(expected.chunks(element_size));
                wrong += elements
                    .filter(|(actual, expected)| actual != expected)
                    .count() as u64;
            }
        }
        wrong
    }
}

/// A bijection of 64 bits whose every output bit depends on every input bit.
pub(super) fn mix(mut x: u64) -> u64 {
    x ^= x >> 32;
    x = x.wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x ^= x >> 32;
    x = x.wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x ^ (x >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(source: Source, start: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        source.fill(start, &mut bytes);
        bytes
    }

    #[test]
    fn a_piece_is_what_it_is_in_the_whole() {
        let source = Source::new(1, 2);
        let whole = data(source, 0, 10_000);
        assert_eq!(data(source, 4000, 333), whole[4000..4333]);
        assert_eq!(source.count_wrong(4000, &whole[4000..9999], 8), 0);
    }

    #[test]
    fn every_type_of_mistake_is_counted_in_elements() {
        let source = Source::new(3, 0);
        for size in [1usize, 2, 4, 8] {
            let good = data(source, 0, 9000);
            let mut one = good.clone();
            one[4096] ^= 0x80;
            assert_eq!(source.count_wrong(0, &one, size), 1);
            let mut two_in_one = good.clone();
            two_in_one[64] ^= 1;
            two_in_one[64 + size - 1] ^= 2;
            assert_eq!(source.count_wrong(0, &two_in_one, size), 1);
            let zeroed = vec![0; 9000];
            let elements = 9000 / size as u64;
            let wrong = source.count_wrong(0, &zeroed, size);
            assert!(
                wrong <= elements && wrong >= elements * 98 / 100,
                "{wrong} of {elements}"
            );
        }
    }

    #[test]
    fn data_of_another_rank_place_or_repetition_does_not_match() {
        let source = Source::new(5, 1);
        for (other, start) in [(Source::new(5, 2), 0), (Source::new(6, 1), 0), (source, 16)] {
            let wrong = source.count_wrong(0, &data(other, start, 1 << 16), 4);
            assert!(wrong > (1 << 14) - 8, "{wrong}");
        }
    }

    #[test]
    fn sources_do_not_repeat() {
        let mut keys: Vec<_> = (0..100)
            .flat_map(|rep| (0..100).map(move |rank| Source::new(rep, rank).key))
            .collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), 10_000);
    }
}
