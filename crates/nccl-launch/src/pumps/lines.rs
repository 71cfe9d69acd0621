//! A stream of bytes, cut into lines.

/// The length in bytes after which a line is passed on in pieces.
pub(super) const LONGEST: usize = 1 << 20;

/// The unfinished line of a stream.
#[derive(Default)]
pub(super) struct Lines {
    partial: Vec<u8>,
}

impl Lines {
    /// Calls `each` with every line that `bytes` complete, including its `\n`, and with the pieces of lines that are
    /// too long.
    pub(super) fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(&[u8])) {
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            let ended = piece.ends_with(b"\n");
            if ended && self.partial.is_empty() {
                each(piece);
                continue;
            }
            self.partial.extend_from_slice(piece);
            if ended || self.partial.len() >= LONGEST {
                each(&self.partial);
                self.partial.clear();
            }
        }
        if self.partial.is_empty() {
            // Keeping a mebibyte for each of a thousand ranks would waste memory.
            self.partial.shrink_to(4096);
        }
    }

    /// Returns the remaining bytes: a line without a terminator.
    pub(super) fn finish(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.partial)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(chunks: &[&[u8]]) -> (Vec<Vec<u8>>, Vec<u8>) {
        let (mut lines, mut found) = (Lines::default(), Vec::new());
        for chunk in chunks {
            lines.feed(chunk, |line| found.push(line.to_vec()));
        }
        (found, lines.finish())
    }

    #[test]
    fn lines_are_whole_however_they_come() {
        let text = b"one\n\ntwo \xff\0 three\nrest";
        let expected = (
            vec![
                b"one\n".to_vec(),
                b"\n".to_vec(),
                b"two \xff\0 three\n".to_vec(),
            ],
            b"rest".to_vec(),
        );
        assert_eq!(cut(&[text]), expected);
        let bytes: Vec<&[u8]> = text.chunks(1).collect();
        assert_eq!(cut(&bytes), expected);
    }

    #[test]
    fn a_line_without_end_does_not_take_all_memory() {
        let chunk = vec![b'x'; 1 << 16];
        let mut lines = Lines::default();
        let mut passed = 0;
        for _ in 0..100 {
            lines.feed(&chunk, |piece| passed += piece.len());
            assert!(lines.partial.capacity() <= 2 * LONGEST);
        }
        assert_eq!(passed + lines.finish().len(), 100 << 16);
    }
}
