//! The known models, and the files of both architectures.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::collectives::{Collectives, Shape};
use super::decoder::Decoder;
use super::elastic::Elastic;
use super::error::{Error, Result};
use super::llama::{Llama, LlamaFile};
use super::step::{AnyPart, Settings};
use super::tokenizer::Tokenizer;
use super::weights::WeightsFile;

/// A model by its name.
///
/// ```
/// use inference_server::model::Known;
/// assert_eq!(Known::named("tiny"), Some(Known::Tiny));
/// assert_eq!(Known::named("smollm2").map(Known::ranks), Some(3));
/// assert_eq!(Known::names(), "tiny, smollm2");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// The model in the repository.
    Tiny,
    /// SmolLM2-135M-Instruct, downloaded by `scripts/get-smollm2`.
    SmolLm2,
}

impl Known {
    /// All known models.
    pub const ALL: [Self; 2] = [Self::Tiny, Self::SmolLm2];

    /// Returns the name of the model for clients and `--model`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::SmolLm2 => "smollm2",
        }
    }

    /// Returns the model with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|model| model.name() == name)
    }

    /// Returns all names, separated by commas.
    #[must_use]
    pub fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }

    /// Returns the path of the model's file; `models` is the directory of downloaded models.
    #[must_use]
    pub fn path(self, models: &Path) -> PathBuf {
        match self {
            Self::Tiny => tiny(),
            Self::SmolLm2 => models.join("SmolLM2-135M-Instruct.Q4_1.gguf"),
        }
    }

    /// Returns the default number of ranks.
    #[must_use]
    pub fn ranks(self) -> usize {
        match self {
            Self::Tiny => 2,
            Self::SmolLm2 => 3,
        }
    }

    /// Returns the default settings.
    #[must_use]
    pub fn settings(self) -> Settings {
        match self {
            Self::Tiny => Settings::default(),
            // The model was trained with 8192 positions. Keys and values of one position take 46 kB, over all ranks.
            Self::SmolLm2 => Settings {
                positions: 2048,
                ..Settings::default()
            },
        }
    }

    /// Opens the model's file.
    ///
    /// # Errors
    /// Those of [`ModelFile::open`]; [`Error::Unusable`], with instructions, if the file must be downloaded first.
    pub fn open(self, models: &Path) -> Result<ModelFile> {
        let path = self.path(models);
        if self == Self::SmolLm2 && !path.exists() {
            let text = format!(
                "{} is not there: `scripts/get-smollm2` fetches it (93 MB); with a directory as its argument, \
                 start the server with --models and that directory",
                path.display()
            );
            return Err(Error::Unusable(text));
        }
        ModelFile::open(path)
    }
}

fn without_experts() -> Error {
    Error::Unusable(String::from(
        "a model without experts has none that could have copies: it is not elastic",
    ))
}

/// Returns the path of the model in the repository.
#[must_use]
pub fn tiny() -> PathBuf {
    PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/models/tiny.safetensors"
    ))
}

/// Returns the default directory of `scripts/get-smollm2`.
#[must_use]
pub fn fetched() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = here.ancestors().nth(2).unwrap_or(here);
    root.join(".cache/models")
}

/// A model file of either architecture.
///
/// ```
/// use inference_server::model::{self, Alone, ModelFile, Settings};
/// let file = ModelFile::open(model::tiny())?;
/// assert_eq!(file.positions(), 1024);
/// let alone = Alone::new(file.shape(40));
/// let part = file.load(alone, Settings::default())?;
/// assert!(part.ends(0));
/// # Ok::<(), model::Error>(())
/// ```
pub enum ModelFile {
    /// A mixture of experts, as `cargo xtask train-tiny` writes it.
    Mixture(WeightsFile),
    /// A Llama, as GGUF.
    Llama(LlamaFile),
}

impl ModelFile {
    /// Opens a file. A file that begins with the magic number of GGUF is a Llama.
    ///
    /// # Errors
    /// [`Error::Weights`], which names the file and what is wrong with it; [`Error::Config`].
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let mut first = [0; 4];
        let begins = File::open(&path).and_then(|mut file| file.read_exact(&mut first));
        // An unreadable file is reported by the `open` below.
        match begins.is_ok() && first == *b"GGUF" {
            true => Ok(Self::Llama(LlamaFile::open(path)?)),
            false => Ok(Self::Mixture(WeightsFile::open(path)?)),
        }
    }

    /// Returns the numbers of ranks that can share the model.
    #[must_use]
    pub fn rank_counts(&self) -> Vec<usize> {
        match self {
            Self::Mixture(file) => file.config().rank_counts(),
            Self::Llama(file) => file.config().rank_counts(),
        }
    }

    /// Refuses a number of ranks that cannot share the model.
    ///
    /// # Errors
    /// [`Error::Ranks`], with the numbers of ranks that can.
    pub fn check_ranks(&self, ranks: usize) -> Result<()> {
        match self {
            Self::Mixture(file) => file.config().shard(0, ranks).map(drop),
            Self::Llama(file) => file.config().check_ranks(ranks),
        }
    }

    /// Returns the length of the longest text, in tokens.
    #[must_use]
    pub fn positions(&self) -> usize {
        match self {
            Self::Mixture(file) => file.config().max_position_embeddings,
            Self::Llama(file) => file.config().max_position_embeddings,
        }
    }

    /// Returns the sizes of the exchanged data for steps of `rows` rows.
    #[must_use]
    pub fn shape(&self, rows: usize) -> Shape {
        match self {
            Self::Mixture(file) => Shape::new(file.config(), rows),
            Self::Llama(file) => file.config().shape(rows),
        }
    }

    /// Returns the tokenizer of the model.
    ///
    /// # Errors
    /// [`Error::Weights`] for a vocabulary that cannot be used.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        match self {
            Self::Mixture(_) => Ok(Tokenizer::default()),
            Self::Llama(file) => file.tokenizer(),
        }
    }

    /// Returns the number of experts of a layer; 0 for a model without experts.
    #[must_use]
    pub fn experts(&self) -> usize {
        match self {
            Self::Mixture(file) => file.config().num_local_experts,
            Self::Llama(_) => 0,
        }
    }

    /// Reads a rank's part of the model laid out by requests. `ranks` has the placement of the experts.
    ///
    /// # Errors
    /// As [`Elastic::load`]; [`Error::Unusable`] for a model without experts.
    pub fn load_elastic<C: Collectives + 'static>(
        &self,
        ranks: C,
        settings: Settings,
    ) -> Result<Box<AnyPart<C>>> {
        match self {
            Self::Mixture(file) => Ok(Box::new(Elastic::load(file, ranks, settings)?)),
            Self::Llama(_) => Err(without_experts()),
        }
    }

    /// Reads a rank's part, and allocates its cache.
    ///
    /// # Errors
    /// [`Error::Ranks`]; [`Error::Unusable`] for settings that do not fit the model or the ranks; [`Error::Weights`].
    pub fn load<C: Collectives + 'static>(
        &self,
        ranks: C,
        settings: Settings,
    ) -> Result<Box<AnyPart<C>>> {
        match self {
            Self::Mixture(file) => Ok(Box::new(Decoder::load(file, ranks, settings)?)),
            Self::Llama(file) => Ok(Box::new(Llama::load(file, ranks, settings)?)),
        }
    }
}
