use std::sync::Arc;

use parking_lot::Mutex;

use super::*;
use crate::bench::Ratio;
use crate::element;
use crate::program;
use crate::shape::Case;

#[derive(Clone, Default)]
struct Page(Arc<Mutex<Vec<u8>>>);

impl Write for Page {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn facts(emulator: Option<&str>) -> Facts {
    Facts {
        program: "all_to_all_perf".into(),
        headers: 23203,
        library: 23203,
        release: "2.32.3".into(),
        library_path: "/lib".into(),
        ranks_text: "2 threads".into(),
        binding: "none".into(),
        emulator: emulator.map(str::to_owned),
    }
}

fn printed(emulator: Option<&str>) -> String {
    let page = Page::default();
    let out = Box::new(page.clone());
    let options = Options::default();
    let mut printer = Printer::new(
        &program::ALL_TO_ALL,
        &options,
        facts(emulator),
        Some(out),
        Progress::silent(),
        None,
    );
    let device = DeviceLine {
        rank: 0,
        pid: 1,
        host: "h".into(),
        device: 0,
        pci: [0; 3],
        name: "d".into(),
    };
    printer.begin(&[device]).unwrap();
    printer.before_tables("ncclMemAlloc", &[]).unwrap();
    printer.table(None).unwrap();
    let measured = Measurement {
        seconds: 1e-5,
        host_seconds: 1e-6,
        wrong: Some(0),
        wrong_here: false,
        per_iteration: None,
    };
    let row = Row {
        shape: Shape::split(1024, Case::of(element::FLOAT), 2),
        out_of_place: measured.clone(),
        in_place: measured,
        notes: Vec::new(),
        ratio: Some(Ratio {
            copy_seconds: 1e-6,
            operation_seconds: 2e-6,
            ratio: 2.0,
            lowest: 1.9,
            highest: 2.1,
        }),
    };
    printer.row(&row).unwrap();
    printer
        .end(
            &Totals {
                out_of_bounds: 0,
                average_bus: 0.25,
            },
            None,
            None,
        )
        .unwrap();
    printer.finish(None).unwrap();
    let bytes = page.0.lock().clone();
    String::from_utf8(bytes).unwrap()
}

#[test]
fn rows_are_the_only_lines_that_are_no_comments() {
    let text = printed(Some("an emulator"));
    let rows: Vec<_> = text
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty())
        .collect();
    let [row] = rows[..] else { panic!("{text}") };
    assert!(row.starts_with("        1024           128     float    none      -1    10.00"));
    assert!(
        text.ends_with("# Collective test concluded: all_to_all_perf\n#\n\n"),
        "{text}"
    );
}

#[test]
fn an_emulator_is_named_and_a_gpu_is_not_called_one() {
    let emulated = printed(Some("the emulator"));
    assert!(
        emulated.contains("# Emulated             : the emulator"),
        "{emulated}"
    );
    assert!(emulated.contains("by the CPU"), "{emulated}");
    let real = printed(None);
    assert!(!real.contains("mulat"), "{real}");
    assert!(real.contains("on the device"), "{real}");
}

#[test]
fn the_ratio_stands_in_comments_below_the_rows() {
    let text = printed(None);
    let line = "# memcpy ratio         1024 B    float :   2.00 (1.90 .. 2.10), 2.00 us / 1.00 us";
    assert!(text.contains(line), "{text}");
}
