//! The trained model is the one that is served, and training with the same seed gives the same model.

mod support;

use std::fs;

use inference_server::model::{
    self, Alone, Config, Decoder, Part, Settings, Shape, WeightsFile, tokenizer,
};
use inference_server::train::{Corpus, Network, Plan, train};
use support::{Model, SETTINGS, rows, text};

fn plan() -> Plan {
    Plan {
        seed: 5,
        steps: 12,
        texts: 2,
        length: 24,
        rate: 1e-2,
        balance: 0.01,
    }
}

fn corpus() -> Corpus {
    let text = "One rank sends, the other receives, and both wait for no longer than a deadline. ";
    Corpus::new([&*text.repeat(30), "Another text."])
}

fn config() -> Config {
    Config {
        sliding_window: 16,
        ..support::config()
    }
}

#[test]
fn the_same_seed_gives_the_same_file_and_another_seed_another_one() {
    let directory = tempfile::tempdir().unwrap();
    let trained = |name: &str, plan: &Plan| {
        let (network, report) = train(&config(), &corpus(), plan, |_| {}).unwrap();
        let path = directory.path().join(name);
        network.save(&path, &report).unwrap();
        (fs::read(path).unwrap(), report)
    };
    let (first, report) = trained("first", &plan());
    assert_eq!(trained("second", &plan()).0, first);
    let other = Plan { seed: 6, ..plan() };
    let (other, other_report) = trained("other", &other);
    assert_ne!(other, first);
    assert_ne!(other_report.loss, report.loss);
}

#[test]
fn training_makes_the_loss_smaller_and_uses_all_experts() {
    let longer = Plan {
        steps: 60,
        ..plan()
    };
    let mut said = Vec::new();
    let (_, report) = train(&config(), &corpus(), &longer, |progress| {
        said.push(progress)
    })
    .unwrap();
    assert_eq!(
        said.iter().map(|one| one.step).collect::<Vec<_>>(),
        [50, 60]
    );
    // Guessing costs 5.5 nats.
    assert!(report.loss < 3.5, "{report:?}");
    assert!(report.held_out_loss < 4.0, "{report:?}");
    assert!(report.imbalance < 2.0, "{report:?}");
    assert!(
        (said[1].loss - report.loss).abs() < 1.0,
        "{said:?}, {report:?}"
    );
}

/// Returns the text's logits from training code and from inference code.
fn both(file: &WeightsFile, settings: Settings, text: &[u32]) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let network = Network::read(file).unwrap();
    let trained = network
        .logits(text, text.len())
        .unwrap()
        .to_vec2::<f32>()
        .unwrap();
    let alone = Alone::new(Shape::new(file.config(), settings.rows));
    let mut decoder = Decoder::load(file, alone, settings).unwrap();
    let mut served = Vec::new();
    for (number, part) in text.chunks(settings.rows).enumerate() {
        let step = rows(0, number * settings.rows, part);
        let logits = decoder.step(&step).unwrap();
        served.extend((0..part.len()).map(|row| logits.row(row).unwrap().to_vec()));
    }
    (trained, served)
}

#[test]
fn what_is_served_is_what_was_trained_but_for_rounding() {
    let model = Model::new(&support::config());
    let file = WeightsFile::open(model.path()).unwrap();
    for seed in 0..3 {
        let (trained, served) = both(&file, SETTINGS, &text(seed, 60));
        for (position, (trained, served)) in trained.iter().zip(&served).enumerate() {
            for (trained, served) in trained.iter().zip(served) {
                let far = (trained - served).abs();
                assert!(
                    far < 1e-3,
                    "seed {seed}, position {position}: {trained}, {served}"
                );
            }
        }
    }
}

#[test]
fn the_model_of_the_repository_has_learnt_to_spell() {
    let file = WeightsFile::open(model::tiny()).unwrap();
    let text = tokenizer::encode(
        "Every rank calls the same operations in the same order. When one of them dies, the others are told \
         which one it was, on which host, and what it was doing at the time.",
    );
    let alone = Alone::new(Shape::new(file.config(), 200));
    let settings = Settings {
        rows: 200,
        slots: 1,
        positions: 200,
    };
    let mut decoder = Decoder::load(&file, alone, settings).unwrap();
    let logits = decoder.step(&rows(0, 0, &text)).unwrap();
    let loss = |position: usize| {
        let logits = logits.row(position).unwrap();
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        sum.ln() - f64::from(logits[text[position + 1] as usize])
    };
    let mean = (0..text.len() - 1).map(loss).sum::<f64>() / (text.len() - 1) as f64;
    // Guessing costs 5.5 nats, knowing how often each letter is about 3.
    assert!(mean < 2.0, "{mean}");
}

#[test]
fn a_plan_that_cannot_be_is_refused() {
    let none = Plan { steps: 0, ..plan() };
    let long = Plan {
        length: 2000,
        ..plan()
    };
    let wild = Plan {
        rate: 1e12,
        ..plan()
    };
    for (plan, words) in [
        (none, "0 steps"),
        (long, "2000 tokens"),
        (wild, "try a lower rate"),
    ] {
        let error = train(&config(), &corpus(), &plan, |_| {})
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains(words), "{error}");
    }
}
