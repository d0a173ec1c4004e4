//! Medians and percentiles.

use serde_json::{Value, json};

/// Measured values of one kind.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    /// Adds a value.
    pub(crate) fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// Returns the median, or NaN without values.
    pub(crate) fn median(&self) -> f64 {
        let sorted = self.sorted();
        match sorted.len() {
            0 => f64::NAN,
            length if length % 2 == 1 => sorted[length / 2],
            length => (sorted[length / 2 - 1] + sorted[length / 2]) / 2.0,
        }
    }

    /// Returns the number of values, their median and their 99th percentile as JSON.
    pub(crate) fn figures(&self) -> Value {
        let rounded = |value: f64| (value * 1e3).round() / 1e3;
        json!({"n": self.0.len(), "median": rounded(self.median()), "p99": rounded(self.p99())})
    }

    /// Returns the 99th percentile by nearest rank, which is the maximum of fewer than 100 values.
    /// Returns NaN without values.
    fn p99(&self) -> f64 {
        let sorted = self.sorted();
        let rank = (sorted.len() * 99).div_ceil(100);
        sorted.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
    }

    /// Returns the values in ascending order.
    fn sorted(&self) -> Vec<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: impl IntoIterator<Item = f64>) -> Samples {
        Samples(values.into_iter().collect())
    }

    #[test]
    fn median_and_percentile_of_few_and_many() {
        assert!(of([]).median().is_nan() && of([]).p99().is_nan());
        assert_eq!((of([3.0, 1.0, 2.0]).median(), of([3.0, 1.0, 2.0]).p99()), (2.0, 3.0));
        assert_eq!(of([4.0, 1.0, 2.0, 3.0]).median(), 2.5);
        let many = of((1..=200).map(f64::from));
        assert_eq!((many.median(), many.p99()), (100.5, 198.0));
    }
}
