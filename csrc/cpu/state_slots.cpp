#include "state_slots.h"

#include "../core/element.h"
#include "flush_denormals.h"

namespace selective_scan::cpu {
namespace {

/// The states of one row of a (row, channel, state) array, with elements of one type.
template <class Element>
struct StateRow {
  Element* data;
  int64_t channel, state, imag;

  StateRow(const ArrayView& view, int64_t row)
      : data(static_cast<Element*>(view.data) + row * view.batch),
        channel(view.channel),
        state(view.state),
        imag(view.imag) {}
};

template <class Real, class From, class To>
void copy(const StateSlots& slots, const StateRow<From>& from, const StateRow<To>& to) {
  for (int64_t part = 0; part < (slots.is_complex ? 2 : 1); ++part) {
    for (int64_t channel = 0; channel < slots.channels; ++channel) {
      const From* source = from.data + channel * from.channel + part * from.imag;
      To* target = to.data + channel * to.channel + part * to.imag;
      for (int64_t n = 0; n < slots.dstate; ++n) {
        target[n * to.state] = to_element<To>(from_element<Real>(source[n * from.state]));
      }
    }
  }
}

void copy(const StateSlots& slots, const ArrayView& from, int64_t from_row, const ArrayView& to,
          int64_t to_row) {
  const FlushDenormals flush;  // also for copies outside a task
  visit_dtype(from.dtype, [&]<class From>(From*) {
    visit_dtype(to.dtype, [&]<class To>(To*) {
      const StateRow<From> source(from, from_row);
      const StateRow<To> target(to, to_row);
      slots.is_double ? copy<double>(slots, source, target) : copy<float>(slots, source, target);
    });
  });
}

}  // namespace

void load_slot(const StateSlots& slots, int64_t sequence, const ArrayView& to) {
  const int64_t slot = slots.source(sequence);
  if (slot != StateSlots::kNoSlot) return copy(slots, slots.pool, slot, to, sequence);
  // A row in which one 0 stands for all states.
  double zero = 0;
  ArrayView zeros;
  zeros.data = &zero;
  zeros.dtype = DType::kFloat64;
  copy(slots, zeros, 0, to, sequence);
}

void store_slot(const StateSlots& slots, const ArrayView& from, int64_t row, int64_t slot) {
  copy(slots, from, row, slots.pool, slot);
}

void clear_sequence(const StateSlots& slots, const PackedSequences& packed, int64_t sequence,
                    const ArrayView& out) {
  for (int64_t channel = 0; channel < slots.channels; ++channel) {
    for (int64_t step = packed.begin(sequence); step < packed.end(sequence); ++step) {
      store_element(out.data, out.dtype, channel * out.channel + step * out.step, 0.0f);
    }
  }
}

}  // namespace selective_scan::cpu
