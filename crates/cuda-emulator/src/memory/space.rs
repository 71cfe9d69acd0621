//! The free pages of a pool: ranges by start, to join neighbours, and by length, to find the
//! smallest that fits.

use std::collections::{BTreeMap, BTreeSet};

/// Free ranges, counted in pages.
#[derive(Debug)]
pub(super) struct Space {
    by_start: BTreeMap<u32, u32>,
    by_length: BTreeSet<(u32, u32)>,
    free: u64,
}

impl Space {
    /// Creates a space of `pages` free pages.
    pub(super) fn new(pages: u32) -> Self {
        let mut space = Self {
            by_start: BTreeMap::new(),
            by_length: BTreeSet::new(),
            free: 0,
        };
        space.give(0, pages);
        space
    }

    /// Returns the number of free pages.
    pub(super) fn free(&self) -> u64 {
        self.free
    }

    /// Takes `pages` that start at a multiple of `align`: the smallest range that has them, small
    /// ones from the low end, aligned ones from the high end, so that they do not interleave.
    pub(super) fn take(&mut self, pages: u32, align: u32) -> Option<u32> {
        let (length, start, at) =
            self.by_length
                .range((pages, 0)..)
                .find_map(|&(length, start)| {
                    let at = if align == 1 {
                        start
                    } else {
                        let last = start + (length - pages);
                        last - last % align
                    };
                    (at >= start).then_some((length, start, at))
                })?;
        self.remove(start, length);
        if at > start {
            self.insert(start, at - start);
        }
        let end = start + length;
        if at + pages < end {
            self.insert(at + pages, end - at - pages);
        }
        Some(at)
    }

    /// Returns pages to the space.
    pub(super) fn give(&mut self, start: u32, pages: u32) {
        let (mut start, mut pages) = (start, pages);
        if pages == 0 {
            return;
        }
        if let Some((&before, &length)) = self.by_start.range(..start).next_back() {
            debug_assert!(before + length <= start, "given back twice");
            if before + length == start {
                self.remove(before, length);
                start = before;
                pages += length;
            }
        }
        if let Some(&length) = self.by_start.get(&(start + pages)) {
            self.remove(start + pages, length);
            pages += length;
        }
        self.insert(start, pages);
    }

    fn insert(&mut self, start: u32, length: u32) {
        self.by_start.insert(start, length);
        self.by_length.insert((length, start));
        self.free += u64::from(length);
    }

    fn remove(&mut self, start: u32, length: u32) {
        self.by_start.remove(&start);
        self.by_length.remove(&(length, start));
        self.free -= u64::from(length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_joins_its_neighbours() {
        let mut space = Space::new(1000);
        let taken: Vec<_> = (0..10).map(|_| space.take(10, 1).unwrap()).collect();
        assert_eq!(space.free(), 900);
        for start in taken
            .iter()
            .step_by(2)
            .chain(taken.iter().skip(1).step_by(2))
        {
            space.give(*start, 10);
        }
        assert_eq!(space.by_start.len(), 1);
        assert_eq!(space.take(1000, 1), Some(0));
        assert_eq!(space.take(1, 1), None);
    }

    #[test]
    fn aligned_ranges_are_aligned_and_inside() {
        let mut space = Space::new(2048);
        assert_eq!(space.take(3, 1), Some(0));
        let at = space.take(512, 512).unwrap();
        assert_eq!(at % 512, 0);
        let at = space.take(1024, 512).unwrap();
        assert_eq!(at % 512, 0);
        assert_eq!(
            space.take(512, 512),
            None,
            "the first 512 hold the small one"
        );
        assert_eq!(space.free(), 2048 - 3 - 512 - 1024);
    }

    #[test]
    fn random_use_never_hands_out_a_page_twice() {
        let mut space = Space::new(4096);
        let mut owner = vec![false; 4096];
        let mut held = Vec::new();
        let mut seed = 42_u64;
        for _ in 0..if cfg!(miri) { 300 } else { 20_000 } {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let pages = (seed >> 33) as u32 % 20 + 1;
            if seed >> 63 == 0 || held.is_empty() {
                let align = if pages > 15 { 16 } else { 1 };
                if let Some(at) = space.take(pages, align) {
                    assert_eq!(at % align, 0);
                    for page in at..at + pages {
                        assert!(!std::mem::replace(&mut owner[page as usize], true));
                    }
                    held.push((at, pages));
                }
            } else {
                let (at, pages) = held.swap_remove((seed >> 40) as usize % held.len());
                for page in at..at + pages {
                    assert!(std::mem::replace(&mut owner[page as usize], false));
                }
                space.give(at, pages);
            }
        }
        let used: u32 = held.iter().map(|(_, pages)| pages).sum();
        assert_eq!(space.free(), u64::from(4096 - used));
    }
}
