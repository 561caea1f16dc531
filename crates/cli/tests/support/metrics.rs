//! The text of `/metrics`, read.

use std::collections::BTreeMap;

/// Every sample of one reading.
#[derive(Clone, Debug)]
pub struct Metrics(Vec<Sample>);

#[derive(Clone, Debug)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Metrics {
    pub fn parse(text: &str) -> Metrics {
        let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        Metrics(lines.map(sample).collect())
    }

    /// The sum of all samples of a name that have these labels; 0 where there is none.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let has = |sample: &&Sample| {
            let own = |(label, value): &(&str, &str)| {
                sample.labels.get(*label).is_some_and(|own| own == value)
            };
            sample.name == name && labels.iter().all(own)
        };
        self.0.iter().filter(has).map(|sample| sample.value).sum()
    }

    /// The same as a whole number.
    pub fn count(&self, name: &str, labels: &[(&str, &str)]) -> u64 {
        self.sum(name, labels) as u64
    }

    /// Samples of a name that are not 0, as text.
    pub fn not_zero(&self, name: &str) -> Vec<String> {
        let of = |sample: &&Sample| sample.name == name && sample.value != 0.0;
        self.0.iter().filter(of).map(|s| format!("{name}{:?} is {}", s.labels, s.value)).collect()
    }
}

fn sample(line: &str) -> Sample {
    let (series, value) = line.rsplit_once(' ').expect("a sample");
    let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
    // No label of these tests has a comma or a quote in its value.
    let labels = labels.trim_end_matches('}').split(',').filter_map(|label| label.split_once('='));
    Sample {
        name: name.to_owned(),
        labels: labels.map(|(n, v)| (n.to_owned(), v.trim_matches('"').to_owned())).collect(),
        value: value.parse().unwrap_or(f64::NAN),
    }
}
