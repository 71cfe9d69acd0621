//! The training data: the pages of this repository, in a fixed order.

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::model::tokenizer::{END, encode};
use crate::model::{Error, Result};

/// The first pages; those of `docs` follow, by name.
const FIRST: [&str; 3] = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"];

/// Pages of figures, without prose.
const LEFT_OUT: &str = "docs/results";

/// One of this many bytes, at the end, is held out of the training.
const HELD_OUT: usize = 32;

/// The tokens of texts, one after another, each followed by [`END`].
#[derive(Clone, Debug)]
pub struct Corpus {
    tokens: Vec<u32>,
}

impl Corpus {
    /// Creates a corpus of these texts.
    ///
    /// ```
    /// use inference_server::train::Corpus;
    /// let corpus = Corpus::new(["a text, ", "and another one"]);
    /// assert_eq!(corpus.tokens().len(), 25);
    /// ```
    #[must_use]
    pub fn new<'a>(texts: impl IntoIterator<Item = &'a str>) -> Self {
        let mut tokens = Vec::new();
        for text in texts {
            tokens.extend(encode(text));
            tokens.push(END);
        }
        Self { tokens }
    }

    /// Reads the pages of the repository at `root`.
    ///
    /// # Errors
    /// [`Error::Unusable`] for a page that cannot be read.
    pub fn of_repository(root: &Path) -> Result<Self> {
        let read = |path: &PathBuf| {
            let failed =
                |error| Error::Unusable(format!("cannot read {}: {error}", path.display()));
            fs::read_to_string(path).map_err(failed)
        };
        let texts: Vec<String> = pages(root)?.iter().map(read).collect::<Result<_>>()?;
        Ok(Self::new(texts.iter().map(String::as_str)))
    }

    /// Returns all tokens.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the training tokens and the held-out tokens.
    #[must_use]
    pub fn parts(&self) -> (&[u32], &[u32]) {
        self.tokens
            .split_at(self.tokens.len() - self.tokens.len() / HELD_OUT)
    }

    /// Returns the SHA-256 of the tokens as bytes, in hexadecimal digits.
    #[must_use]
    pub fn sha256(&self) -> String {
        let bytes: Vec<u8> = self.tokens.iter().map(|&token| token as u8).collect();
        Sha256::digest(bytes)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }
}

/// Returns the paths of the pages, in their order.
fn pages(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    walk(&root.join("docs"), &root.join(LEFT_OUT), &mut found)?;
    found.sort();
    Ok(FIRST
        .iter()
        .map(|name| root.join(name))
        .chain(found)
        .collect())
}

fn walk(directory: &Path, left_out: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    let failed = |error| Error::Unusable(format!("cannot read {}: {error}", directory.display()));
    for entry in fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.is_dir() && path != left_out {
            walk(&path, left_out, found)?;
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pages_of_this_repository_are_found_in_a_fixed_order() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let pages = pages(&root).unwrap();
        assert!(pages[0].ends_with("README.md"), "{pages:?}");
        assert!(
            pages
                .iter()
                .any(|page| page.ends_with("docs/expert-parallel.md"))
        );
        assert!(
            !pages
                .iter()
                .any(|page| page.starts_with(root.join(LEFT_OUT)))
        );
        assert!(pages[3..].is_sorted());
        let corpus = Corpus::of_repository(&root).unwrap();
        assert!(corpus.tokens().len() > 100_000);
        let (seen, unseen) = corpus.parts();
        assert_eq!([seen, unseen].concat(), corpus.tokens());
    }

    #[test]
    fn other_texts_have_another_hash() {
        assert_eq!(
            Corpus::new([]).sha256(),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        );
        assert_ne!(
            Corpus::new(["ab", "c"]).sha256(),
            Corpus::new(["a", "bc"]).sha256()
        );
    }
}
