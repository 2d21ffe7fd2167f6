// Staging: kernels work on tiles of the compute type, whose rows are consecutive lanes. The
// functions here move tiles from and to strided arrays of any element type.
//
// An array is read along two of its dimensions: one becomes the rows, the other the lanes. If
// either is contiguous in memory, whole vectors move (transposed in registers if it is the rows'
// dimension), else single elements.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../../core/dtype.h"
#include "../../core/element.h"
#include "transpose.h"
#include "vector.h"

namespace selective_scan::cpu {

/// A two-dimensional section of an array; strides count elements.
struct Section {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t lanes = 0;
  int64_t row_stride = 0;
  int64_t lane_stride = 0;
  int64_t rows_ahead = 0;         // distance to the next section to be moved, if known
  bool goes_past_caches = false;  // for stores; call finish_stores_past_caches() after them
};

/// Prefetches the cache line of an address, which need not exist, into the second-level cache: rows
/// a power of two apart would evict each other from the first.
SELECTIVE_SCAN_HD void prefetch(const void* base, int64_t bytes) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<intptr_t>(base) + bytes), 0, 2);
}

/// Stores past the caches, which saves reading the old contents. `target` must be aligned like
/// vectors.
template <class T, class K>
SELECTIVE_SCAN_HD void store_past_caches(Vec<T, K> x, T* target) {
#if defined(__x86_64__)
  float* numbers = reinterpret_cast<float*>(target);
  if constexpr (Vec<T, K>::kBytes == 64) {
    _mm512_stream_ps(numbers, bit_cast<__m512>(x.native));
  } else if constexpr (Vec<T, K>::kBytes == 32) {
    _mm256_stream_ps(numbers, bit_cast<__m256>(x.native));
  } else {
    _mm_stream_ps(numbers, bit_cast<__m128>(x.native));
  }
#else
  x.store(target);
#endif
}
/// Makes these stores visible before any later store.
SELECTIVE_SCAN_HD void finish_stores_past_caches() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

/// Converts W consecutive elements of type Element to R and back.
template <class R, class Element>
struct Converter {
  static constexpr int kWidth = R::kWidth;
  using T = typename R::Scalar;

  /// True if a lane of R has room for two consecutive elements, the first in its low bits.
  static constexpr bool kPairs =
      sizeof(T) == 4 && sizeof(Element) == 2 && std::endian::native == std::endian::little;

  static SELECTIVE_SCAN_HD R load(const Element* source) {
    if constexpr (std::is_same_v<Element, T>) {
      return R::load(source);
    } else if constexpr (sizeof(Element) == 2) {
      native_t<uint16_t, kWidth> packed;
      memcpy(&packed, source, sizeof(packed));
      return widen(packed);
    } else {
      native_t<Element, kWidth> packed;
      memcpy(&packed, source, sizeof(packed));
      return R::from(__builtin_convertvector(packed, typename R::Native));
    }
  }

  /// Loads the first `count` lanes; the others are 0.
  static SELECTIVE_SCAN_HD R load_part(const Element* source, int64_t count) {
    if (count >= kWidth) return load(source);
    if constexpr (kLoadsParts<R, Element>) {
      const auto packed = load_native_part<R>(source, count);
      if constexpr (std::is_same_v<Element, T>) return R::from(packed);
      if constexpr (sizeof(Element) == 2) return widen(packed);
    } else {
      Element part[kWidth] = {};
      memcpy(part, source, count * sizeof(Element));
      return load(part);
    }
  }

  static SELECTIVE_SCAN_HD void store_part(R value, Element* target, int64_t count) {
    if (count >= kWidth) return store(value, target);
    Element part[kWidth];
    store(value, part);
    memcpy(target, part, count * sizeof(Element));
  }

  static SELECTIVE_SCAN_HD void store(R value, Element* target) {
    if constexpr (std::is_same_v<Element, T>) {
      value.store(target);
    } else if constexpr (sizeof(Element) == 2) {
      const auto packed =
          __builtin_convertvector(narrow(__builtin_convertvector(value.native, Floats), Element{}),
                                  native_t<uint16_t, kWidth>);
      memcpy(target, &packed, sizeof(packed));
    } else {
      const auto packed = __builtin_convertvector(value.native, native_t<Element, kWidth>);
      memcpy(target, &packed, sizeof(packed));
    }
  }

  /// unpack() converts the first and the second elements of pairs to numbers; pack() does the
  /// reverse.
  static SELECTIVE_SCAN_HD void unpack(R pairs, R& first, R& second) {
    const Words words = bit_cast<Words>(pairs.native);
    first = R::from(widen(words << 16, Element{}));
    second = R::from(widen(words & 0xffff0000u, Element{}));
  }
  static SELECTIVE_SCAN_HD R pack(R first, R second) {
    const Words words = narrow(first.native, Element{}) | narrow(second.native, Element{}) << 16;
    return R::from(bit_cast<typename R::Native>(words));
  }

 private:
  // The functions of core/dtype.h for all lanes at once.
  using Words = native_t<uint32_t, kWidth>;
  using Integers = native_t<int32_t, kWidth>;
  using Floats = native_t<float, kWidth>;

  static SELECTIVE_SCAN_HD R widen(native_t<uint16_t, kWidth> packed) {
    if constexpr (kWidensHalves<R> && std::is_same_v<Element, Half>) {
      return widen_halves<R>(packed);
    } else {
      return R::from(
          __builtin_convertvector(widen(in_high_halves(packed), Element{}), typename R::Native));
    }
  }
  static SELECTIVE_SCAN_HD Words in_high_halves(native_t<uint16_t, kWidth> packed) {
    if constexpr (kSpreadsHalves<R>) {
      return bit_cast<Words>(spread_into_high_halves<R>(packed).native);
    } else {
      return __builtin_convertvector(packed, Words) << 16;
    }
  }
  /// Takes one instruction, where the compilers would use more.
  static SELECTIVE_SCAN_HD Floats lesser_of(Floats a, Floats b) {
    if constexpr (sizeof(T) == sizeof(float)) {
      return lesser(R::from(a), R::from(b)).native;
    } else {
      return a < b ? a : b;
    }
  }
  /// Widens the elements in the words' high halves.
  static SELECTIVE_SCAN_HD Floats widen(Words high, BFloat16) { return bit_cast<Floats>(high); }
  static SELECTIVE_SCAN_HD Floats widen(Words high, Half) {
    // Comparing signed integers takes fewer instructions.
    const Integers magnitude = bit_cast<Integers>((high & 0x7fff0000u) >> 3);
    const Floats x = bit_cast<Floats>(magnitude + 0x38000000);
    const Floats subnormal = 2.0f * x - 0x1p-14f;
    const Integers finite = bit_cast<Integers>(lesser_of(subnormal, x));
    const Integers number = magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : finite;
    return bit_cast<Floats>(bit_cast<Words>(number) | (high & 0x80000000u));
  }
  static SELECTIVE_SCAN_HD Words narrow(Floats value, BFloat16) {
    const Words bits = bit_cast<Words>(value);
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded;
  }
  static SELECTIVE_SCAN_HD Words narrow(Floats value, Half) {
    const Words bits = bit_cast<Words>(value);
    const Words magnitude = bits & 0x7fffffffu;
    const Words subnormal = bit_cast<Words>(bit_cast<Floats>(magnitude) + 0.5f) - 0x3f000000u;
    const Words normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const Words infinite = Words{} + 0x7c00u;
    const Words nan = Words{} + 0x7e00u;
    const Words half = magnitude > 0x7f800000u    ? nan
                       : magnitude >= 0x47800000u ? infinite
                       : magnitude < 0x38800000u  ? subnormal
                                                  : normal;
    return half | ((bits >> 16) & 0x8000u);
  }
};

/// Moves a section from or to a tile of at most one vector of lanes, with rows `pitch` apart.
template <class R, class Element>
struct TileMover {
  using T = typename R::Scalar;
  using Convert = Converter<R, Element>;
  static constexpr int kWidth = R::kWidth;

  /// Loads a section; lanes that it lacks become 0.
  static void load(const Section& section, T* tile, int64_t pitch) {
    const Element* source = static_cast<const Element*>(section.data);
    if (section.lane_stride == 1 && section.lanes == kWidth) {
      for (int64_t row = 0; row < section.rows; ++row) {
        Convert::load(source + row * section.row_stride).store(tile + row * pitch);
      }
      return;
    }
    int64_t row = move_columns(section, tile, pitch);
    for (; row < section.rows; ++row) {
      for (int64_t lane = 0; lane < kWidth; ++lane) {
        tile[row * pitch + lane] =
            lane < section.lanes
                ? from_element<T>(source[row * section.row_stride + lane * section.lane_stride])
                : T(0);
      }
    }
  }

  static void store(const Section& section, const T* tile, int64_t pitch) {
    Element* target = static_cast<Element*>(section.data);
    if (section.lane_stride == 1 && section.lanes == kWidth) {
      for (int64_t row = 0; row < section.rows; ++row) {
        Convert::store(R::load(tile + row * pitch), target + row * section.row_stride);
      }
      return;
    }
    int64_t row = move_columns(section, tile, pitch);
    for (; row < section.rows; ++row) {
      for (int64_t lane = 0; lane < section.lanes; ++lane) {
        target[row * section.row_stride + lane * section.lane_stride] =
            to_element<Element>(tile[row * pitch + lane]);
      }
    }
  }

 private:
  /// The number of lanes as a compile-time constant, which lets all loops unroll.
  using WholeVector = std::integral_constant<int64_t, kWidth>;

  /// The element of the row that comes first in memory, of the `count` rows from `row` on, and its
  /// place in the tile.
  struct Rows {
    int64_t element;
    int64_t tile;
    int64_t pitch;

    SELECTIVE_SCAN_HD Rows(const Section& section, int64_t row, int64_t count, int64_t tile_pitch) {
      const bool forward = section.row_stride == 1;
      element = forward ? row : -(row + count - 1);
      tile = (forward ? row : row + count - 1) * tile_pitch;
      pitch = forward ? tile_pitch : -tile_pitch;
    }
  };

  static SELECTIVE_SCAN_HD int64_t bytes_ahead(const Section& section) {
    return section.rows_ahead * section.row_stride * int64_t{sizeof(Element)};
  }

  // Always unrolled: a loop would keep the registers in memory.
  static constexpr auto kRows = std::make_index_sequence<kWidth>();
  template <size_t... kIndices>
  static SELECTIVE_SCAN_HD void load_rows(R* rows, const T* tile, int64_t pitch,
                                          std::index_sequence<kIndices...>) {
    ((rows[kIndices] = R::load(tile + int64_t{kIndices} * pitch)), ...);
  }
  template <size_t... kIndices>
  static SELECTIVE_SCAN_HD void store_rows(const R* rows, T* tile, int64_t pitch,
                                           std::index_sequence<kIndices...>) {
    (rows[kIndices].store(tile + int64_t{kIndices} * pitch), ...);
  }
  template <size_t... kIndices>
  static SELECTIVE_SCAN_HD void load_pairs(R* pairs, const T* tile, int64_t pitch,
                                           std::index_sequence<kIndices...>) {
    ((pairs[kIndices] = Convert::pack(R::load(tile + int64_t{2 * kIndices} * pitch),
                                      R::load(tile + int64_t{2 * kIndices + 1} * pitch))),
     ...);
  }
  template <size_t... kIndices>
  static SELECTIVE_SCAN_HD void store_pairs(const R* pairs, T* tile, int64_t pitch,
                                            std::index_sequence<kIndices...>) {
    const auto store = [&](R both, int64_t row) {
      R first, second;
      Convert::unpack(both, first, second);
      first.store(tile + row * pitch);
      second.store(tile + (row + 1) * pitch);
    };
    (store(pairs[kIndices], int64_t{2 * kIndices}), ...);
  }

  /// Moves rows that are adjacent in memory, as many at a time as a vector of a lane's elements
  /// holds, and returns the number of rows moved. Narrow elements are transposed as pairs, which
  /// takes half the shuffles. These functions load into a tile, and store from a constant one.
  template <class Number>
  static SELECTIVE_SCAN_HD int64_t move_columns(const Section& section, Number* tile,
                                                int64_t pitch) {
    if (section.row_stride != 1 && section.row_stride != -1) return 0;
    return section.lanes == kWidth ? move_blocks(section, tile, pitch, WholeVector{})
                                   : move_blocks(section, tile, pitch, section.lanes);
  }
  template <class Number, class Lanes>
  static SELECTIVE_SCAN_HD int64_t move_blocks(const Section& section, Number* tile, int64_t pitch,
                                               Lanes lanes) {
    int64_t row = 0;
    if constexpr (Convert::kPairs) {
      for (; row + 2 * kWidth <= section.rows; row += 2 * kWidth) {
        move_block<true>(section, row, tile, pitch, lanes);
      }
    }
    for (; row + kWidth <= section.rows; row += kWidth) {
      move_block<false>(section, row, tile, pitch, lanes);
    }
    return row;
  }

  template <bool kPairs, class Lanes>
  static SELECTIVE_SCAN_HD void move_block(const Section& section, int64_t row, T* tile,
                                           int64_t pitch, Lanes lanes) {
    const Rows rows(section, row, kPairs ? 2 * kWidth : kWidth, pitch);
    const Element* block = static_cast<const Element*>(section.data) + rows.element;
    const int64_t ahead = bytes_ahead(section);
    R columns[kWidth];
    for (int lane = 0; lane < kWidth; ++lane) {
      columns[lane] = R(T(0));
      if (lane < lanes) {
        const Element* source = block + lane * section.lane_stride;
        if constexpr (kPairs) {
          memcpy(&columns[lane], source, sizeof(R));
        } else {
          columns[lane] = Convert::load(source);
        }
        // The lanes' rows are too many streams for the hardware prefetcher.
        prefetch(source, ahead);
      }
    }
    transpose(columns);
    if constexpr (kPairs) {
      store_pairs(columns, tile + rows.tile, rows.pitch, kRows);
    } else {
      store_rows(columns, tile + rows.tile, rows.pitch, kRows);
    }
  }
  template <bool kPairs, class Lanes>
  static SELECTIVE_SCAN_HD void move_block(const Section& section, int64_t row, const T* tile,
                                           int64_t pitch, Lanes lanes) {
    const Rows rows(section, row, kPairs ? 2 * kWidth : kWidth, pitch);
    Element* block = static_cast<Element*>(section.data) + rows.element;
    const int64_t ahead = bytes_ahead(section);
    R columns[kWidth];
    if constexpr (kPairs) {
      load_pairs(columns, tile + rows.tile, rows.pitch, kRows);
    } else {
      load_rows(columns, tile + rows.tile, rows.pitch, kRows);
    }
    transpose(columns);
    for (int lane = 0; lane < kWidth; ++lane) {
      if (lane < lanes) {
        Element* target = block + lane * section.lane_stride;
        if constexpr (kPairs || std::is_same_v<Element, T>) {
          if (section.goes_past_caches && reinterpret_cast<uintptr_t>(target) % sizeof(R) == 0) {
            store_past_caches(columns[lane], reinterpret_cast<T*>(target));
            continue;
          }
        }
        if constexpr (kPairs) {
          memcpy(target, &columns[lane], sizeof(R));
        } else {
          Convert::store(columns[lane], target);
        }
        // Without it the stores wait for their cache lines and, in time, everything for the stores.
        prefetch(target, ahead);
      }
    }
  }
};

/// Returns the part of a section that one vector of lanes covers.
template <class R>
SELECTIVE_SCAN_HD Section lanes_from(Section section, int64_t first) {
  section.data = element_at(section, first * section.lane_stride);
  const int64_t left = section.lanes - first;
  section.lanes = left < R::kWidth ? left : R::kWidth;
  return section;
}

/// Loads a section of any number of lanes. The tile's rows hold the lanes padded to whole vectors.
template <class R>
void load_tile(const Section& section, typename R::Scalar* tile, int64_t pitch) {
  visit_dtype(section.dtype, [&]<class Element>(Element*) {
    for (int64_t first = 0; first < section.lanes; first += R::kWidth) {
      TileMover<R, Element>::load(lanes_from<R>(section, first), tile + first, pitch);
    }
  });
}

template <class R>
void store_tile(const Section& section, const typename R::Scalar* tile, int64_t pitch) {
  visit_dtype(section.dtype, [&]<class Element>(Element*) {
    for (int64_t first = 0; first < section.lanes; first += R::kWidth) {
      TileMover<R, Element>::store(lanes_from<R>(section, first), tile + first, pitch);
    }
  });
}

/// Move a section of any number of lanes, row by row if the lanes of a row are contiguous, so that
/// memory is accessed in order.
template <class R>
void load_rows(const Section& section, typename R::Scalar* tile, int64_t pitch) {
  if (section.lane_stride != 1) return load_tile<R>(section, tile, pitch);
  visit_dtype(section.dtype, [&]<class Element>(Element*) {
    const int64_t ahead = section.rows_ahead * section.row_stride * int64_t{sizeof(Element)};
    for (int64_t row = 0; row < section.rows; ++row) {
      const Element* source = static_cast<const Element*>(section.data) + row * section.row_stride;
      for (int64_t lane = 0; lane < section.lanes; lane += R::kWidth) {
        prefetch(source + lane, ahead);
        Converter<R, Element>::load_part(source + lane, section.lanes - lane)
            .store(tile + row * pitch + lane);
      }
    }
  });
}
template <class R>
void store_rows(const Section& section, const typename R::Scalar* tile, int64_t pitch) {
  if (section.lane_stride != 1) return store_tile<R>(section, tile, pitch);
  visit_dtype(section.dtype, [&]<class Element>(Element*) {
    const int64_t ahead = section.rows_ahead * section.row_stride * int64_t{sizeof(Element)};
    for (int64_t row = 0; row < section.rows; ++row) {
      Element* target = static_cast<Element*>(section.data) + row * section.row_stride;
      for (int64_t lane = 0; lane < section.lanes; lane += R::kWidth) {
        prefetch(target + lane, ahead);
        Converter<R, Element>::store_part(R::load(tile + row * pitch + lane), target + lane,
                                          section.lanes - lane);
      }
    }
  });
}

/// Move a section of a single lane, and leave the tile's other lanes unchanged.
template <class R>
void load_lane(const Section& section, typename R::Scalar* tile, int64_t pitch) {
  visit_dtype(section.dtype, [&]<class Element>(Element*) {
    const Element* source = static_cast<const Element*>(section.data);
    for (int64_t row = 0; row < section.rows; ++row) {
      tile[row * pitch] = from_element<typename R::Scalar>(source[row * section.row_stride]);
    }
  });
}

template <class R>
void store_lane(const Section& section, const typename R::Scalar* tile, int64_t pitch) {
  visit_dtype(section.dtype, [&]<class Element>(Element*) {
    Element* target = static_cast<Element*>(section.data);
    for (int64_t row = 0; row < section.rows; ++row) {
      target[row * section.row_stride] = to_element<Element>(tile[row * pitch]);
    }
  });
}

}  // namespace selective_scan::cpu
