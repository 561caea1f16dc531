//! The highest rate at which a fleet still meets its SLOs, by bisection.

use super::{ATTAINMENT, Scenario, Workload};

/// Rates that are looked at: no trace is replayed slower or faster than that.
const LOWEST: f64 = 1.0 / 1024.0;
const HIGHEST: f64 = 64.0;

/// Bounds of the answer are this close in the end, as a factor.
const PRECISION: f64 = 1.01;

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goodput {
    /// The highest rate found at which enough requests meet both SLOs; 0 where none is. Above half of
    /// the highest rate that is looked at, it may be more.
    pub rate: f64,
}

/// Finds it. `begun` is told the number of each replay as it begins.
#[must_use]
pub fn goodput(workload: &Workload, scenario: &Scenario, mut begun: impl FnMut(u32)) -> Goodput {
    let mut replays = 0;
    let mut holds = |rate: f64| {
        replays += 1;
        begun(replays);
        attains(workload, &Scenario { rate, ..scenario.clone() })
    };
    let (mut good, mut bad) = (scenario.rate, scenario.rate);
    // First a factor of two around the answer, from the rate given.
    if holds(good) {
        while good * 2.0 <= HIGHEST && holds(good * 2.0) {
            good *= 2.0;
        }
        bad = good * 2.0;
        if bad > HIGHEST {
            return Goodput { rate: good };
        }
    } else {
        loop {
            good = bad / 2.0;
            if good < LOWEST {
                return Goodput { rate: 0.0 };
            }
            if holds(good) {
                break;
            }
            bad = good;
        }
    }
    while bad / good > PRECISION {
        let middle = (good * bad).sqrt();
        if holds(middle) { good = middle } else { bad = middle }
    }
    Goodput { rate: good }
}

/// Whether enough requests meet both SLOs; ends as soon as too many have missed one.
fn attains(workload: &Workload, scenario: &Scenario) -> bool {
    let allowed = ((1.0 - ATTAINMENT) * workload.len() as f64).floor() as usize;
    let mut missed = 0;
    let served = workload.serve_while(scenario, |served| {
        missed += usize::from(!served.meets_both());
        missed <= allowed
    });
    served.is_some()
}
