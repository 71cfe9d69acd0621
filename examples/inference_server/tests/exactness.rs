//! The result of a row depends only on the tokens of its request, to the bit: not on the number of ranks, the other rows, the
//! slot, or the division of the request into steps.

mod support;

use std::sync::Mutex;

use inference_server::generate::{Request, generate};
use inference_server::model::tokenizer::{END, encode};
use inference_server::model::{
    Alone, Arrived, Collectives, Config, Decoder, Error, Part, Result, Row, Sampling, Settings,
    Shape, Tensors, WeightsFile, tiny,
};
use inference_server::ranks::on_threads;
use support::{Model, SETTINGS, bits, config, rows, text};

/// Some steps of several mixed requests; returns the logits of each row.
fn several_steps<P: Part + ?Sized>(decoder: &mut P) -> Result<Vec<Vec<u32>>> {
    let texts: Vec<_> = (0..5).map(|seed| text(seed, 40)).collect();
    let part = |slot: usize, from: usize, to: usize| rows(slot, from, &texts[slot][from..to]);
    let steps = [
        part(0, 0, 7),
        // As many rows as a step has room for.
        [part(0, 7, 8), part(1, 0, 23)].concat(),
        // A single row, so that most ranks have none.
        part(1, 23, 24),
        [part(2, 0, 3), part(0, 8, 9), part(3, 0, 9), part(1, 24, 26)].concat(),
        Vec::new(),
        [part(0, 9, 30), part(4, 0, 2)].concat(),
        [part(0, 30, 40), part(4, 2, 8), part(1, 26, 30)].concat(),
    ];
    let mut all = Vec::new();
    for step in steps {
        let logits = decoder.step(&step)?;
        all.extend((0..step.len()).map(|row| bits(logits.row(row).unwrap())));
    }
    Ok(all)
}

fn nothing_was_caught() {
    let violations = nccl_emulator::violations();
    assert!(violations.is_empty(), "{violations:#?}");
}

#[test]
fn all_numbers_of_ranks_give_the_logits_of_a_single_process() {
    let model = Model::new(&config());
    let expected = several_steps(&mut model.alone(SETTINGS)).unwrap();
    assert_eq!(expected.len(), 7 + 24 + 1 + 15 + 23 + 20);
    for ranks in [1, 2, 4, 8] {
        let found = on_threads(ranks, &model.path(), SETTINGS, several_steps).unwrap();
        for (rank, found) in found.into_iter().enumerate() {
            assert!(found == expected, "rank {rank} of {ranks} has other logits");
        }
    }
    nothing_was_caught();
}

#[test]
fn ranks_need_not_have_a_power_of_two() {
    let config = Config {
        hidden_size: 36,
        num_attention_heads: 6,
        num_local_experts: 9,
        num_experts_per_tok: 3,
        ..config()
    };
    let model = Model::new(&config);
    let expected = several_steps(&mut model.alone(SETTINGS)).unwrap();
    let found = on_threads(3, &model.path(), SETTINGS, several_steps).unwrap();
    assert!(found.iter().all(|found| *found == expected));
}

#[test]
fn the_model_of_the_repository_says_the_same_on_all_numbers_of_ranks() {
    let model = tiny();
    let settings = Settings {
        slots: 2,
        positions: 128,
        ..Settings::default()
    };
    let request = |prompt: &str, seed| Request {
        prompt: encode(prompt),
        most: 24,
        sampling: Sampling {
            temperature: 0.8,
            seed,
            ..Sampling::default()
        },
    };
    let requests = [
        request("The communicator", 1),
        request("When a rank dies,", 2),
    ];
    let say = |ranks| {
        on_threads(ranks, &model, settings, |decoder| {
            generate(decoder, &requests, 32, |_, _| {})
        })
        .unwrap()
    };
    let expected = say(1).remove(0);
    assert!(expected.iter().any(|made| made.len() == 24));
    for ranks in [2, 4, 8] {
        assert!(
            say(ranks).iter().all(|found| *found == expected),
            "{ranks} ranks"
        );
    }
}

#[test]
fn all_rows_may_choose_the_same_experts() {
    for top_k in [1, 2] {
        let config = Config {
            num_experts_per_tok: top_k,
            ..config()
        };
        // All experts are equal, so the first ones are chosen, which are on rank 0.
        let model = Model::changed(&config, |numbers| {
            for (name, numbers) in numbers {
                if name.ends_with("gate.weight") {
                    numbers.fill(0.0);
                }
            }
        });
        let expected = several_steps(&mut model.alone(SETTINGS)).unwrap();
        for ranks in [2, 8] {
            let found = on_threads(ranks, &model.path(), SETTINGS, several_steps).unwrap();
            assert!(
                found.iter().all(|found| *found == expected),
                "{ranks} ranks"
            );
        }
    }
    nothing_was_caught();
}

/// Returns the logits of a text that is divided into several steps, each beside other requests.
fn cut(model: &Model, text: &[u32], slot: usize, parts: &[usize], noise: u64) -> Vec<Vec<u32>> {
    let mut decoder = model.alone(SETTINGS);
    let mut random = fastrand::Rng::with_seed(noise);
    let (mut from, mut all) = (0, Vec::new());
    for &length in parts {
        let own = rows(slot, from, &text[from..from + length]);
        let other = |slot: usize, random: &mut fastrand::Rng| {
            let length = random.usize(0..4);
            let tokens: Vec<_> = (0..length).map(|_| random.u32(1..256)).collect();
            rows(slot, 0, &tokens)
        };
        let [before, after] = match noise {
            0 => [Vec::new(), Vec::new()],
            _ => [
                other((slot + 1) % 8, &mut random),
                other((slot + 5) % 8, &mut random),
            ],
        };
        let step = [&before[..], &own, &after].concat();
        let logits = decoder.step(&step).unwrap();
        let own = before.len()..before.len() + length;
        all.extend(own.map(|row| bits(logits.row(row).unwrap())));
        from += length;
    }
    all
}

#[test]
fn neighbours_slots_and_cuts_do_not_change_a_bit() {
    let model = Model::new(&config());
    let text = text(9, 48);
    let expected = cut(&model, &text, 0, &[16, 16, 16], 0);
    assert_eq!(cut(&model, &text, 0, &[1; 48], 0), expected);
    assert_eq!(cut(&model, &text, 6, &[16, 16, 16], 0), expected);
    for seed in 1..20 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut parts, mut left) = (Vec::new(), 48);
        while left > 0 {
            parts.push(random.usize(1..=16).min(left));
            left -= parts[parts.len() - 1];
        }
        let found = cut(&model, &text, random.usize(0..8), &parts, seed);
        assert!(found == expected, "seed {seed}, parts {parts:?}");
    }
    // Ensures that the results are not equal for a trivial reason.
    let mut other = text.clone();
    other[20] ^= 1;
    let other = cut(&model, &other, 0, &[16, 16, 16], 0);
    assert_eq!(other[..20], expected[..20]);
    assert!((20..48).all(|position| other[position] != expected[position]));
}

#[test]
fn a_slot_that_is_used_again_knows_nothing_of_what_was_there() {
    let model = Model::new(&config());
    let (first, second) = (text(1, 24), text(2, 24));
    let mut fresh = model.alone(SETTINGS);
    let expected = fresh.step(&rows(3, 0, &second)).unwrap();
    let mut decoder = model.alone(SETTINGS);
    decoder.step(&rows(3, 0, &first)).unwrap();
    assert_eq!(decoder.step(&rows(3, 0, &second)).unwrap(), expected);
    // Goes back to an earlier position.
    let again = decoder.step(&rows(3, 20, &second[20..])).unwrap();
    assert_eq!(again.row(3), expected.row(23));
}

fn requests() -> Vec<Request> {
    let request = |number: u64| Request {
        prompt: text(number, 1 + (number as usize * 7) % 40),
        most: 3 + (number as usize * 5) % 17,
        sampling: match number % 3 {
            0 => Sampling::greedy(),
            _ => Sampling {
                temperature: 1.2,
                top_k: 50,
                top_p: 0.95,
                seed: number,
            },
        },
    };
    (0..16).map(request).collect()
}

#[test]
fn sixteen_requests_at_once_say_what_each_says_alone() {
    let model = Model::new(&config());
    let requests = requests();
    let alone: Vec<_> = requests
        .iter()
        .map(|request| {
            let mut decoder = model.alone(SETTINGS);
            generate(&mut decoder, std::slice::from_ref(request), 5, |_, _| {})
                .unwrap()
                .remove(0)
        })
        .collect();
    assert!(alone.iter().any(|made| made.len() > 15));
    for (ranks, chunk) in [(1, 32), (2, 8), (4, 3)] {
        let found = on_threads(ranks, &model.path(), SETTINGS, |decoder| {
            generate(decoder, &requests, chunk, |_, _| {})
        })
        .unwrap();
        assert!(found.iter().all(|found| *found == alone), "{ranks} ranks");
    }
}

#[test]
fn a_request_that_is_begun_again_from_its_tokens_goes_on_with_the_same_ones() {
    let model = Model::new(&config());
    for request in requests().into_iter().take(6) {
        let whole = on_threads(4, &model.path(), SETTINGS, |decoder| {
            generate(decoder, std::slice::from_ref(&request), 32, |_, _| {})
        });
        let whole = whole.unwrap().remove(0).remove(0);
        let cut = whole.len() / 2;
        // As after a death: fewer ranks, an empty cache, and different steps.
        let again = Request {
            prompt: [&request.prompt[..], &whole[..cut]].concat(),
            most: request.most - cut,
            ..request
        };
        let rest = on_threads(2, &model.path(), SETTINGS, |decoder| {
            generate(decoder, std::slice::from_ref(&again), 7, |_, _| {})
        });
        assert_eq!(rest.unwrap()[0][0], whole[cut..]);
    }
}

/// Ranks of which one has died.
struct Broken {
    after: usize,
    alone: Alone,
    ranks: usize,
}

impl Broken {
    fn new(after: usize, ranks: usize) -> Self {
        let alone = Alone::new(Shape::new(&config(), SETTINGS.rows));
        Self {
            after,
            alone,
            ranks,
        }
    }

    fn call(&mut self) -> Result<()> {
        self.after = self
            .after
            .checked_sub(1)
            .ok_or_else(|| Error::Unusable("dead".into()))?;
        Ok(())
    }
}

impl Collectives for Broken {
    fn rank(&self) -> usize {
        0
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn all_to_all(&mut self, x: &[f32], y: &mut [f32]) -> Result<()> {
        self.call()?;
        self.alone.all_to_all(x, y)
    }

    fn all_gather(&mut self, x: &[f32], y: &mut [f32]) -> Result<()> {
        self.call()?;
        self.alone.all_gather(x, y)
    }

    fn dispatch(&mut self, choices: &[i32], x: &[f32], arrived: &mut Arrived) -> Result<()> {
        self.call()?;
        self.alone.dispatch(choices, x, arrived)
    }

    fn combine(&mut self, made: &[f32], weights: &[f32], out: &mut [f32]) -> Result<()> {
        self.call()?;
        self.alone.combine(made, weights, out)
    }
}

#[test]
fn weights_outlive_a_connection_that_fails_anywhere_in_a_step() {
    let model = Model::new(&config());
    let (first, again) = (rows(2, 0, &text(1, 9)), rows(2, 0, &text(2, 12)));
    let expected = model.alone(SETTINGS).step(&again).unwrap();
    let file = WeightsFile::open(model.path()).unwrap();
    let mut decoder = Decoder::load(&file, Broken::new(8, 1), SETTINGS).unwrap();
    decoder.step(&first).unwrap();
    for after in 0..8 {
        decoder.renew(Broken::new(after, 1)).unwrap();
        assert_eq!(decoder.step(&again).unwrap_err().to_string(), "dead");
        decoder.renew(Broken::new(8, 1)).unwrap();
        // The caches are empty.
        assert!(decoder.step(&again[1..]).is_err());
        assert_eq!(decoder.step(&again).unwrap(), expected);
    }
    let error = decoder.renew(Broken::new(0, 2)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the part of rank 0 of 1 is loaded, and this is rank 0 of 2: load its part"
    );
}

#[test]
fn a_rank_that_gives_up_ends_the_steps_of_the_others_and_is_named() {
    let model = Model::new(&config());
    let heard = Mutex::new(Vec::new());
    let outcome = on_threads(4, &model.path(), SETTINGS, |decoder| {
        let step = rows(0, 0, &text(1, 9));
        loop {
            if let Err(error) = decoder.step(&step) {
                heard.lock().unwrap().push(error.to_string());
                return Err::<(), _>(error);
            }
            // By now all ranks are in the step.
            if decoder.ranks().rank() == 3 {
                return Err(Error::Unusable("there is no more paper".into()));
            }
        }
    });
    assert_eq!(outcome.unwrap_err().to_string(), "there is no more paper");
    let heard = heard.into_inner().unwrap();
    assert_eq!(heard.len(), 3);
    for text in heard {
        assert!(
            text.contains("rank 3") && text.contains("there is no more paper"),
            "{text}"
        );
    }
}

#[test]
fn a_text_ends_with_its_token_or_with_the_cache() {
    let request = Request {
        prompt: text(1, 50),
        most: 1000,
        sampling: Sampling::greedy(),
    };
    // All tokens are equally likely, and the first of them ends a text.
    let ends = Model::changed(&config(), |numbers| {
        numbers.get_mut(Tensors::HEAD).unwrap().fill(0.0);
    });
    let say = |model: &Model| {
        let mut said = Vec::new();
        let requests = std::slice::from_ref(&request);
        let made = generate(&mut model.alone(SETTINGS), requests, 32, |_, token| {
            said.push(token)
        });
        assert_eq!(made.unwrap(), [said.clone()]);
        said
    };
    assert_eq!(say(&ends), [END]);
    assert_eq!(say(&Model::new(&config())).len(), SETTINGS.positions - 50);
    let long = Request {
        prompt: text(1, 64),
        ..request.clone()
    };
    let mut decoder = ends.alone(SETTINGS);
    let error = generate(&mut decoder, &[long], 32, |_, _| {}).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the prompt of request 0 has 64 tokens: 1 to 63 are possible"
    );
}

#[test]
fn a_step_that_cannot_be_is_refused_and_changes_nothing() {
    let model = Model::new(&config());
    let (mut decoder, mut other) = (model.alone(SETTINGS), model.alone(SETTINGS));
    let text = text(4, 10);
    decoder.step(&rows(2, 0, &text[..4])).unwrap();
    other.step(&rows(2, 0, &text[..4])).unwrap();
    let row = |slot, position, token| Row {
        slot,
        position,
        token,
        logits: false,
    };
    let refused = [
        (
            vec![row(8, 0, 1)],
            "row 0 of a step of 1: there are 8 slots, no slot 8",
        ),
        (
            vec![row(1, 0, 1), row(2, 5, 1)],
            "row 1 of a step of 2: position 5 of slot 2, of which 4 are there",
        ),
        (
            vec![row(2, 4, 1), row(2, 4, 1)],
            "row 1 of a step of 2: position 4 of slot 2 does not follow the one before",
        ),
        (
            vec![row(2, 4, 256)],
            "row 0 of a step of 1: token 256 of a vocabulary of 256",
        ),
        (
            vec![row(2, 64, 1)],
            "row 0 of a step of 1: position 64 of a cache of 64",
        ),
        (
            rows(0, 0, &[1; 25]),
            "row 24 of a step of 25: a step has room for 24 rows",
        ),
    ];
    for (step, expected) in refused {
        assert_eq!(decoder.step(&step).unwrap_err().to_string(), expected);
    }
    let rest = rows(2, 4, &text[4..]);
    assert_eq!(decoder.step(&rest).unwrap(), other.step(&rest).unwrap());
}
