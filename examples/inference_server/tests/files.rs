//! Files of weights and numbers of ranks: the supported ones, and the errors for the others.

mod support;

use std::fs;

use candle_core::{DType, Device};
use inference_server::model::{
    self, Alone, Config, Decoder, Error, Settings, Shape, Tensors, WeightsFile,
};
use inference_server::ranks::on_threads;
use support::{Model, SETTINGS, config};

#[test]
fn the_model_of_the_repository_is_small_and_says_where_it_is_from() {
    let bytes = fs::metadata(model::tiny()).unwrap().len();
    assert!(bytes <= 4 << 20, "{bytes} bytes");
    let file = WeightsFile::open(model::tiny()).unwrap();
    assert_eq!(*file.config(), Config::tiny());
    let report: inference_server::train::Report =
        serde_json::from_str(file.training().unwrap()).unwrap();
    assert_eq!(report.corpus_sha256.len(), 64);
    assert!(report.plan.steps >= 1000 && report.loss < 2.0, "{report:?}");
}

#[test]
fn candle_reads_the_files_as_well() {
    let model = Model::new(&config());
    let tensors = candle_core::safetensors::load(model.path(), &Device::Cpu).unwrap();
    let expected = Tensors::of(&config());
    assert_eq!(tensors.len(), expected.len());
    for (name, shape) in expected {
        assert_eq!(
            (tensors[&name].dims(), tensors[&name].dtype()),
            (&shape[..], DType::BF16)
        );
    }
}

/// Returns the error for a changed file.
fn refused(change: impl FnOnce(Vec<u8>) -> Vec<u8>) -> String {
    let model = Model::new(&config());
    let bytes = fs::read(model.path()).unwrap();
    fs::write(model.path(), change(bytes)).unwrap();
    let error = WeightsFile::open(model.path()).unwrap_err();
    let text = error.to_string();
    let place = format!("{}: ", model.path().display());
    text.strip_prefix(&place).unwrap_or(&text).to_owned()
}

/// Replaces words of the header by others of the same length.
fn replaced(from: &str, to: &str) -> String {
    assert_eq!(from.len(), to.len());
    refused(|mut bytes| {
        let found = bytes
            .windows(from.len())
            .position(|part| part == from.as_bytes());
        let at = found.expect("words of the header");
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        bytes
    })
}

#[test]
fn a_file_that_is_cut_or_is_something_else_is_refused_with_the_reason() {
    let cut = refused(|bytes| bytes[..bytes.len() - 100].to_vec());
    assert!(cut.ends_with("the file is cut or damaged"), "{cut}");
    let shorter = refused(|bytes| bytes[..100].to_vec());
    assert!(
        shorter.ends_with("this is no safetensors file, or it is cut"),
        "{shorter}"
    );
    let empty = refused(|_| Vec::new());
    assert!(
        empty.starts_with("it ends too early to be a safetensors file"),
        "{empty}"
    );
    let page = refused(|_| b"# A page of text, and no weights at all".to_vec());
    assert!(page.contains("this is no safetensors file"), "{page}");
    let missing = WeightsFile::open("/nowhere/model.safetensors").unwrap_err();
    assert!(
        missing
            .to_string()
            .starts_with("/nowhere/model.safetensors: cannot open it")
    );
}

#[test]
fn a_tensor_that_is_missing_or_has_another_shape_or_type_is_named() {
    let router = "model.layers.1.block_sparse_moe.gate.weight";
    let other = "model.layers.1.block_sparse_moe.gaze.weight";
    assert_eq!(
        replaced(&format!("{router}\""), &format!("{other}\"")),
        format!("it lacks the tensor {router}, of shape [8, 32]")
    );
    assert_eq!(
        replaced(r#""shape":[256,32]"#, r#""shape":[32,256]"#),
        "lm_head.weight has the shape [32, 256], and should have [256, 32]"
    );
    assert_eq!(
        replaced(r#""dtype":"BF16""#, r#""dtype": "I16""#),
        "lm_head.weight is of type I16: convert it to BF16 or F32"
    );
    let unknown = replaced(r#""dtype":"BF16""#, r#""dtype":"F8_E""#);
    assert!(unknown.contains("unknown variant `F8_E`"), "{unknown}");
    let nothing = replaced(r#""config""#, r#""confug""#);
    assert!(
        nothing.starts_with("its metadata has no `config`"),
        "{nothing}"
    );
    let uneven = replaced(r#"hidden_size\":32"#, r#"hidden_size\":33"#);
    assert!(
        uneven.starts_with("a model with hidden_size = 33 does not work"),
        "{uneven}"
    );
}

#[test]
fn weights_that_are_no_numbers_are_refused_when_they_are_read() {
    let model = Model::changed(&config(), |numbers| {
        numbers.get_mut(Tensors::NORM).unwrap()[3] = f32::NAN;
    });
    let file = WeightsFile::open(model.path()).unwrap();
    let alone = Alone::new(Shape::new(file.config(), SETTINGS.rows));
    let error = Decoder::load(&file, alone, SETTINGS).err().unwrap();
    assert!(
        error
            .to_string()
            .ends_with("model.norm.weight has a NaN in it: the file is damaged")
    );
}

#[test]
fn a_number_of_ranks_that_cannot_share_the_model_is_refused_before_any_is_started() {
    let model = Model::new(&config());
    for ranks in [0, 3, 5, 16] {
        let error = on_threads(ranks, &model.path(), SETTINGS, |_| Ok(())).unwrap_err();
        assert!(matches!(error, Error::Ranks { .. }), "{error}");
        assert_eq!(
            error.to_string(),
            format!("{ranks} ranks cannot share 8 heads and 8 experts: take 1, 2, 4 or 8 ranks")
        );
    }
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    let model = Model::new(&config());
    let file = WeightsFile::open(model.path()).unwrap();
    let load = |settings: Settings| {
        let alone = Alone::new(Shape::new(file.config(), settings.rows));
        Decoder::load(&file, alone, settings)
            .err()
            .map(|error| error.to_string())
    };
    let long = Settings {
        positions: 65,
        ..SETTINGS
    };
    assert_eq!(load(long).unwrap(), "65 positions for a model of 1 to 64");
    let none = Settings {
        slots: 0,
        ..SETTINGS
    };
    assert!(load(none).unwrap().contains("0 slots"));
    assert_eq!(load(SETTINGS), None);
    let odd = Settings {
        rows: 6,
        ..SETTINGS
    };
    let error = on_threads(4, &model.path(), odd, |_| Ok(())).unwrap_err();
    assert_eq!(
        error.to_string(),
        "4 ranks cannot share steps of 6 rows: take a multiple"
    );
}
