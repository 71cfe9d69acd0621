//! The model laid out by requests, for ranks that come and go.
//!
//! Each rank has the whole attention, and processes the texts of its slots from the first layer to the last. Only the experts
//! are shared: an [`ExpertPlacement`] gives the number of copies of each expert, and their ranks. So any number of ranks works.
//! The loss of a rank loses its copies of experts, and the keys and values of its slots, which are recomputed from the text. A
//! row takes one exchange with the experts in each layer, and one at the end of a step.

use std::borrow::Cow;
use std::collections::HashMap;

use candle_core::{Device, Tensor};
use candle_nn::ops::rms_norm;
use nccl::moe::ExpertPlacement;

use super::attention::Attention;
use super::batch_invariant::linear;
use super::collectives::Collectives;
use super::config::Config;
use super::decoder::{Head, Layer, add};
use super::error::{Error, Result};
use super::experts::{Expert, Experts, Scratch};
use super::moving::Moving;
use super::rotary::Rotary;
use super::step::{Logits, Part, Row, Settings, SlotOwner, Slots};
use super::tokenizer::END;
use super::weights::{Tensors, WeightsFile};

/// One rank's part of a model that is laid out by requests. The logits are bitwise equal to those of a
/// [`Decoder`](super::Decoder).
///
/// ```
/// use inference_server::model::{self, Alone, Elastic, Part, Row, Settings, Shape, WeightsFile};
///
/// let file = WeightsFile::open(model::tiny())?;
/// let settings = Settings::default();
/// let alone = Alone::new(Shape::new(file.config(), settings.rows));
/// let mut elastic = Elastic::load(&file, alone, settings)?;
/// let logits = elastic.step(&[Row { slot: 0, position: 0, token: b'T'.into(), logits: true }])?;
/// assert_eq!(logits.row(0).unwrap().len(), 256);
/// # Ok::<(), model::Error>(())
/// ```
pub struct Elastic<C> {
    config: Config,
    settings: Settings,
    ranks: C,
    /// Source of experts that neither this rank has nor another rank has sent.
    file: WeightsFile,
    /// The expert of each place of this rank.
    held: Vec<Option<usize>>,
    rotary: Rotary,
    embedding: Vec<f32>,
    layers: Vec<Layer>,
    head: Head,
    slots: Slots,
    /// The rank of each slot.
    owners: Vec<usize>,
    /// This rank's rows, with room for all rows of a step.
    own: Vec<f32>,
    normed: Vec<f32>,
    mixed: Vec<f32>,
    /// The rows of all ranks, as gathered and in the order of the step.
    gathered: Vec<f32>,
    all: Vec<f32>,
    scratch: Scratch,
    moving: Option<Moving>,
    /// How often the rows of this rank have chosen each expert.
    loads: Vec<u64>,
}

/// Returns the places of the experts: those that the ranks give, or equal blocks by default.
fn placement<'r>(ranks: &'r impl Collectives, config: &Config) -> Result<Cow<'r, ExpertPlacement>> {
    Ok(match ranks.placement() {
        Some(placement) => Cow::Borrowed(placement),
        None => Cow::Owned(ExpertPlacement::blocks(
            config.num_local_experts,
            ranks.ranks(),
        )?),
    })
}

/// Returns the default rank of each slot.
fn owners(slots: usize, ranks: usize) -> Vec<usize> {
    (0..slots).map(|slot| slot % ranks).collect()
}

impl<C: Collectives> Elastic<C> {
    /// Reads the weights, and of the experts those that the placement gives to this rank, and allocates the cache.
    ///
    /// # Errors
    /// [`Error::Unusable`] for settings that do not fit the model; [`Error::Weights`].
    pub fn load(file: &WeightsFile, ranks: C, settings: Settings) -> Result<Self> {
        let config = file.config().clone();
        let Settings {
            rows,
            slots,
            positions,
        } = settings;
        if rows == 0 || slots == 0 {
            let text = format!("steps of {rows} rows and {slots} slots: neither may be 0");
            return Err(Error::Unusable(text));
        }
        settings.fit(config.max_position_embeddings)?;
        let held: Vec<_> = placement(&ranks, &config)?
            .places_of(ranks.rank())
            .collect();
        // Every rank has all heads.
        let shard = config.shard(0, 1)?;
        let load = |layer| {
            let experts = Experts::load(file, layer, &config, held.iter().copied())?;
            let attention = Attention::load(file, layer, &config, &shard)?;
            Layer::load(
                file,
                layer,
                attention,
                experts,
                (slots, positions, config.hidden_size),
            )
        };
        let hidden = config.hidden_size;
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
            owners: owners(slots, ranks.ranks()),
            own: vec![0.0; rows * hidden],
            normed: vec![0.0; rows * hidden],
            mixed: vec![0.0; rows * hidden],
            gathered: Vec::new(),
            all: vec![0.0; rows * hidden],
            scratch: Scratch::default(),
            moving: None,
            loads: vec![0; config.num_local_experts],
            file: WeightsFile::open(file.path())?,
            held,
            config,
            settings,
            ranks,
        })
    }

    /// Replaces the ranks, and takes the experts that they give to this rank: those that it has stay, the others have arrived
    /// or are read.
    fn take(&mut self, ranks: C, arrived: &HashMap<usize, Vec<f32>>) -> Result<()> {
        let held: Vec<_> = placement(&ranks, &self.config)?
            .places_of(ranks.rank())
            .collect();
        if held != self.held {
            let mut all = Vec::with_capacity(self.layers.len());
            let length = Expert::length(&self.config);
            for (number, layer) in self.layers.iter().enumerate() {
                let find = |expert| match arrived.get(&expert) {
                    Some(numbers) => {
                        let of_layer = &numbers[number * length..(number + 1) * length];
                        Expert::of_numbers(&self.config, of_layer)
                    }
                    None => Experts::read(&self.file, number, expert),
                };
                all.push(layer.experts.at(&self.held, &held, find)?);
            }
            // Replaces the experts only once those of all layers are available.
            for (layer, own) in self.layers.iter_mut().zip(all) {
                layer.experts.put(own);
            }
            self.held = held;
        }
        self.ranks = ranks;
        Ok(())
    }

    fn layer(&mut self, number: usize, mine: &[Row]) -> Result<()> {
        let (hidden, epsilon) = (self.config.hidden_size, self.config.rms_norm_eps as f32);
        let layer = &mut self.layers[number];
        let own = &mut self.own[..mine.len() * hidden];
        let tensor = |x: &[f32]| Tensor::from_slice(x, (x.len() / hidden, hidden), &Device::Cpu);
        let flat = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
        // A rank without rows in this step still takes part in the exchange with the experts.
        let x = match mine.is_empty() {
            true => None,
            false => {
                let x = rms_norm(&tensor(own)?, &layer.norm, epsilon)?;
                let heads = layer
                    .attention
                    .forward(&x, mine, &self.rotary, &mut layer.cache)?;
                add(own, &flat(&linear(&tensor(&heads)?, &layer.output)?)?);
                let x = rms_norm(&tensor(own)?, &layer.experts_norm, epsilon)?;
                self.normed[..own.len()].copy_from_slice(&flat(&x)?);
                Some(x)
            }
        };
        layer.experts.forward(
            x.as_ref(),
            &self.normed,
            &mut self.ranks,
            &mut self.scratch,
            &mut self.mixed,
            self.settings.rows,
        )?;
        for &expert in &self.scratch.choices {
            if let Some(load) = usize::try_from(expert)
                .ok()
                .and_then(|at| self.loads.get_mut(at))
            {
                *load += 1;
            }
        }
        add(own, &self.mixed);
        Ok(())
    }

    /// Gathers the results of all ranks' rows on all ranks.
    fn gather(&mut self, rows: &[Row]) -> Result<()> {
        let (hidden, ranks) = (self.config.hidden_size, self.ranks.ranks());
        let owner = |row: &Row| self.owners[row.slot];
        let count = |rank| rows.iter().filter(|row| owner(row) == rank).count();
        let most = (0..ranks).map(count).max().unwrap_or(0) * hidden;
        self.gathered.resize(ranks * most, 0.0);
        self.ranks
            .all_gather(&self.own[..most], &mut self.gathered)?;
        let mut next: Vec<_> = (0..ranks).map(|rank| rank * most).collect();
        for (x, row) in self.all.chunks_exact_mut(hidden).zip(rows) {
            let at = &mut next[self.owners[row.slot]];
            x.copy_from_slice(&self.gathered[*at..*at + hidden]);
            *at += hidden;
        }
        Ok(())
    }
}

impl<C: Collectives> Part for Elastic<C> {
    type Ranks = C;

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn ranks(&self) -> &C {
        &self.ranks
    }

    fn renew(&mut self, ranks: C) -> Result<()> {
        self.moving = None;
        self.take(ranks, &HashMap::new())?;
        self.slots.empty();
        self.owners = owners(self.settings.slots, self.ranks.ranks());
        Ok(())
    }

    fn cached(&self) -> Vec<(usize, usize)> {
        let rank = self.ranks.rank();
        let all = self.slots.filled().iter().zip(&self.owners).enumerate();
        all.filter(|(_, (filled, owner))| **filled > 0 && **owner == rank)
            .map(|(slot, (filled, _))| (slot, *filled))
            .collect()
    }

    fn give_slots(&mut self, slots: &[SlotOwner]) -> Result<()> {
        let ranks = self.ranks.ranks();
        if slots.len() != self.settings.slots || slots.iter().any(|slot| slot.rank >= ranks) {
            let text = format!(
                "{slots:?} for {} slots of {ranks} ranks",
                self.settings.slots
            );
            return Err(Error::Unusable(text));
        }
        self.owners = slots.iter().map(|slot| slot.rank).collect();
        self.slots.fill(slots.iter().map(|slot| slot.positions));
        Ok(())
    }

    fn plan_moves(&mut self, next: &ExpertPlacement, most: usize) -> Result<usize> {
        let length = self.layers.len() * Expert::length(&self.config);
        let now = placement(&self.ranks, &self.config)?;
        let (moving, rounds) = Moving::new(&now, next, length, most)?;
        self.moving = Some(moving);
        Ok(rounds)
    }

    fn move_experts(&mut self) -> Result<()> {
        let Some(moving) = &mut self.moving else {
            return Err(Error::Unusable(String::from("no experts are to move")));
        };
        let (layers, held) = (&self.layers, &self.held);
        moving.round(&mut self.ranks, |expert| {
            let Some(place) = held.iter().position(|own| *own == Some(expert)) else {
                return Err(Error::Unusable(format!("this rank has no expert {expert}")));
            };
            let mut numbers = Vec::new();
            for layer in layers {
                layer.experts.flatten(place, &mut numbers)?;
            }
            Ok(numbers)
        })
    }

    fn take_loads(&mut self) -> Vec<u64> {
        let loads = self.loads.clone();
        self.loads.iter_mut().for_each(|load| *load /= 2);
        loads
    }

    fn replace_experts(&mut self, ranks: C) -> Result<()> {
        let (before, now) = (&self.ranks, &ranks);
        if (before.rank(), before.ranks()) != (now.rank(), now.ranks()) {
            return Err(Error::Unusable(String::from(
                "other ranks have other slots: begin again with them",
            )));
        }
        let arrived = self.moving.take().map(Moving::finish);
        self.take(ranks, &arrived.unwrap_or_default())
    }

    fn step(&mut self, rows: &[Row]) -> Result<Logits> {
        let filled = self.slots.check(rows)?;
        if rows.is_empty() {
            return Ok(Logits::default());
        }
        let hidden = self.config.hidden_size;
        let rank = self.ranks.rank();
        let mine = rows.iter().filter(|row| self.owners[row.slot] == rank);
        let mine: Vec<Row> = mine.copied().collect();
        for (x, row) in self.own.chunks_exact_mut(hidden).zip(&mine) {
            let token = row.token as usize;
            x.copy_from_slice(&self.embedding[token * hidden..(token + 1) * hidden]);
        }
        for layer in 0..self.layers.len() {
            self.layer(layer, &mine)?;
        }
        self.gather(rows)?;
        let logits = self.head.logits(rows, &self.all, &self.config)?;
        self.slots.written(filled);
        Ok(logits)
    }

    fn ends(&self, token: u32) -> bool {
        token == END
    }
}
