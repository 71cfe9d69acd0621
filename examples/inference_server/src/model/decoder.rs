//! One rank's part of the model, and its steps.

use candle_core::{Device, Tensor};
use candle_nn::ops::rms_norm;

use super::attention::Attention;
use super::batch_invariant::linear;
use super::cache::LayerCache;
use super::collectives::Collectives;
use super::config::Config;
use super::error::{Error, Result};
use super::experts::{Experts, Scratch};
use super::rotary::Rotary;
use super::step::{Logits, Part, Row, Settings, Slots, same_rank};
use super::tokenizer::END;
use super::weights::{Tensors, WeightsFile};

/// One rank's part of a model.
///
/// ```
/// use inference_server::model::{self, Alone, Decoder, Part, Row, Settings, Shape, WeightsFile};
///
/// let file = WeightsFile::open(model::tiny())?;
/// let settings = Settings::default();
/// let alone = Alone::new(Shape::new(file.config(), settings.rows));
/// let mut decoder = Decoder::load(&file, alone, settings)?;
/// let logits = decoder.step(&[Row { slot: 0, position: 0, token: b'T'.into(), logits: true }])?;
/// assert_eq!(logits.row(0).unwrap().len(), 256);
/// # Ok::<(), model::Error>(())
/// ```
pub struct Decoder<C> {
    config: Config,
    settings: Settings,
    ranks: C,
    rotary: Rotary,
    embedding: Vec<f32>,
    layers: Vec<Layer>,
    head: Head,
    slots: Slots,
    buffers: Buffers,
}

pub(super) struct Layer {
    pub(super) norm: Tensor,
    pub(super) attention: Attention,
    pub(super) output: Tensor,
    pub(super) experts_norm: Tensor,
    pub(super) experts: Experts,
    pub(super) cache: LayerCache,
}

impl Layer {
    /// Reads the parts of a layer that every rank has. The last argument has the slots, positions and row length of the cache.
    pub(super) fn load(
        file: &WeightsFile,
        layer: usize,
        attention: Attention,
        experts: Experts,
        (slots, positions, width): (usize, usize, usize),
    ) -> Result<Self> {
        let norm = |which| file.whole(&Tensors::norm(layer, which));
        Ok(Self {
            norm: norm("input_layernorm")?,
            attention,
            output: file.whole(&Tensors::attention(layer, "o_proj"))?,
            experts_norm: norm("post_attention_layernorm")?,
            experts,
            cache: LayerCache::new(slots, positions, width),
        })
    }
}

/// The final norm and the projection to logits.
pub(super) struct Head {
    norm: Tensor,
    head: Tensor,
}

impl Head {
    pub(super) fn load(file: &WeightsFile) -> Result<Self> {
        Ok(Self {
            norm: file.whole(Tensors::NORM)?,
            head: file.whole(Tensors::HEAD)?,
        })
    }

    /// Returns the logits of the rows that want them; `all` has the rows in the order of the step.
    pub(super) fn logits(&self, rows: &[Row], all: &[f32], config: &Config) -> Result<Logits> {
        let hidden = config.hidden_size;
        let of = |(row, x): (&Row, &[f32])| -> Result<Option<Vec<f32>>> {
            if !row.logits {
                return Ok(None);
            }
            let x = Tensor::from_slice(x, (1, hidden), &Device::Cpu)?;
            let x = rms_norm(&x, &self.norm, config.rms_norm_eps as f32)?;
            Ok(Some(linear(&x, &self.head)?.flatten_all()?.to_vec1()?))
        };
        let all = rows.iter().zip(all.chunks_exact(hidden));
        Ok(Logits(all.map(of).collect::<Result<_>>()?))
    }
}

/// The buffers of a step, allocated once. `own` holds this rank's rows, `all` those of all ranks.
#[derive(Default)]
struct Buffers {
    all: Vec<f32>,
    gathered: Vec<f32>,
    own: Vec<f32>,
    sent: Vec<f32>,
    received: Vec<f32>,
    normed: Vec<f32>,
    mixed: Vec<f32>,
    scratch: Scratch,
}

impl<C: Collectives> Decoder<C> {
    /// Reads this rank's part of the file, and allocates the cache.
    ///
    /// # Errors
    /// [`Error::Ranks`]; [`Error::Unusable`] for settings that do not fit the model or the ranks; [`Error::Weights`].
    pub fn load(file: &WeightsFile, ranks: C, settings: Settings) -> Result<Self> {
        let config = file.config().clone();
        let shard = config.shard(ranks.rank(), ranks.ranks())?;
        let Settings {
            rows,
            slots,
            positions,
        } = settings;
        if rows == 0 || !rows.is_multiple_of(shard.ranks) || slots == 0 {
            let text = format!(
                "steps of {rows} rows and {slots} slots: rows have to be a multiple of the {} ranks, neither may be 0",
                shard.ranks
            );
            return Err(Error::Unusable(text));
        }
        settings.fit(config.max_position_embeddings)?;
        let hidden = config.hidden_size;
        let load = |layer| {
            let width = shard.heads.len() * config.head_size();
            let own = shard.experts.clone().map(Some);
            let experts = Experts::load(file, layer, &config, own)?;
            let attention = Attention::load(file, layer, &config, &shard)?;
            Layer::load(file, layer, attention, experts, (slots, positions, width))
        };
        let own = rows / shard.ranks * hidden;
        let buffers = Buffers {
            all: vec![0.0; rows * hidden],
            gathered: vec![0.0; rows * hidden],
            own: vec![0.0; own],
            sent: vec![0.0; own],
            received: vec![0.0; own],
            normed: vec![0.0; own],
            mixed: vec![0.0; own],
            scratch: Scratch::default(),
        };
        Ok(Self {
            rotary: Rotary::new(
                config.head_size(),
                config.rope_theta,
                config.max_position_embeddings,
            )?,
            embedding: file.whole(Tensors::EMBEDDING)?.flatten_all()?.to_vec1()?,
            layers: (0..config.num_hidden_layers)
                .map(load)
                .collect::<Result<_>>()?,
            head: Head::load(file)?,
            slots: Slots::new(settings, config.vocab_size),
            buffers,
            config,
            settings,
            ranks,
        })
    }

    /// Returns the model's configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    fn layer(&mut self, number: usize, rows: &[Row]) -> Result<()> {
        let (hidden, epsilon) = (self.config.hidden_size, self.config.rms_norm_eps as f32);
        let (rank, ranks) = (self.ranks.rank(), self.ranks.ranks());
        let layer = &mut self.layers[number];
        let Buffers {
            all,
            gathered,
            own,
            sent,
            received,
            normed,
            mixed,
            scratch,
        } = &mut self.buffers;
        let tensor = |x: &[f32]| Tensor::from_slice(x, (x.len() / hidden, hidden), &Device::Cpu);
        let flat = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();

        let x = rms_norm(&tensor(&all[..rows.len() * hidden])?, &layer.norm, epsilon)?;
        let heads = layer
            .attention
            .forward(&x, rows, &self.rotary, &mut layer.cache)?;

        // Sends each rank its rows, for this rank's heads.
        let width = hidden / ranks;
        let room = self.settings.rows / ranks;
        for (row, heads) in heads.chunks_exact(width).enumerate() {
            let place = row % ranks * room + row / ranks;
            sent[place * width..(place + 1) * width].copy_from_slice(heads);
        }
        self.ranks.all_to_all(sent, received)?;
        let mine: Vec<usize> = (rank..rows.len()).step_by(ranks).collect();
        let mut heads = vec![0.0; mine.len() * hidden];
        for (row, heads) in heads.chunks_exact_mut(hidden).enumerate() {
            for (source, heads) in heads.chunks_exact_mut(width).enumerate() {
                let place = source * room + row;
                heads.copy_from_slice(&received[place * width..(place + 1) * width]);
            }
        }

        // A rank without rows in this step still takes part in the messages.
        let x = match mine.is_empty() {
            true => None,
            false => {
                for (own, &row) in own.chunks_exact_mut(hidden).zip(&mine) {
                    own.copy_from_slice(&all[row * hidden..(row + 1) * hidden]);
                }
                let own = &mut own[..mine.len() * hidden];
                add(own, &flat(&linear(&tensor(&heads)?, &layer.output)?)?);
                let x = rms_norm(&tensor(own)?, &layer.experts_norm, epsilon)?;
                normed[..own.len()].copy_from_slice(&flat(&x)?);
                Some(x)
            }
        };
        layer
            .experts
            .forward(x.as_ref(), normed, &mut self.ranks, scratch, mixed, room)?;
        add(&mut own[..mine.len() * hidden], mixed);

        self.ranks.all_gather(own, gathered)?;
        for (row, x) in all.chunks_exact_mut(hidden).enumerate().take(rows.len()) {
            let place = row % ranks * room + row / ranks;
            x.copy_from_slice(&gathered[place * hidden..(place + 1) * hidden]);
        }
        Ok(())
    }
}

impl<C: Collectives> Part for Decoder<C> {
    type Ranks = C;

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn ranks(&self) -> &C {
        &self.ranks
    }

    fn renew(&mut self, ranks: C) -> Result<()> {
        same_rank(&self.ranks, &ranks)?;
        self.ranks = ranks;
        self.slots.empty();
        Ok(())
    }

    fn step(&mut self, rows: &[Row]) -> Result<Logits> {
        let filled = self.slots.check(rows)?;
        if rows.is_empty() {
            return Ok(Logits::default());
        }
        let hidden = self.config.hidden_size;
        for (x, row) in self.buffers.all.chunks_exact_mut(hidden).zip(rows) {
            let token = row.token as usize;
            x.copy_from_slice(&self.embedding[token * hidden..(token + 1) * hidden]);
        }
        for layer in 0..self.layers.len() {
            self.layer(layer, rows)?;
        }
        let logits = self.head.logits(rows, &self.buffers.all, &self.config)?;
        self.slots.written(filled);
        Ok(logits)
    }

    fn ends(&self, token: u32) -> bool {
        token == END
    }
}

pub(super) fn add(sum: &mut [f32], other: &[f32]) {
    for (sum, other) in sum.iter_mut().zip(other) {
        *sum += other;
    }
}
