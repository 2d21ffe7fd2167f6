// The matrices of a stack, in the order in which a block multiplies with its rows of them. The warp
// that fetches weights and the warps that multiply follow the same order.
#pragma once

#include "plan.h"

namespace selective_scan::cuda::step {

/// The products of a layer, in order, and the one after the last layer. The rows of in_proj that
/// give x come before those that give z, which are multiplied while x is on its way to other
/// blocks.
enum class Product { kIn, kZ, kX, kOut, kHead };
constexpr int kLayerProducts = 4;

/// Calls visit(product, layer) for the products of all layers, and for the head.
template <class Visit>
__device__ __forceinline__ void for_each_product(const StepParams& params, const Visit& visit) {
  const int products = static_cast<int>(params.layers) * kLayerProducts + 1;
#pragma unroll 1
  for (int i = 0; i < products; ++i) {
    const bool is_head = i + 1 == products;
    visit(is_head ? Product::kHead : static_cast<Product>(i % kLayerProducts), i / kLayerProducts);
  }
}

/// Consecutive rows of a matrix with which a block multiplies.
struct MatrixRows {
  const char* first;
  int count;
  int columns;  // of a row
};

/// Calls visit(tile) for all tiles of rows.
template <class Visit>
__device__ __forceinline__ void for_each_tile(const MatrixRows& rows, const Visit& visit) {
#pragma unroll 1
  for (int tile = 0; tile * kTileRows < rows.count; ++tile) visit(tile);
}
/// Calls visit(column, columns) for all stages of a tile.
template <class W, class Visit>
__device__ __forceinline__ void for_each_stage(const MatrixRows& rows, const Visit& visit) {
  constexpr int kColumns = kRowBytes / static_cast<int>(sizeof(W));
#pragma unroll 1
  for (int column = 0; column < rows.columns; column += kColumns) {
    visit(column, min(kColumns, rows.columns - column));
  }
}

/// A block's rows of the matrices.
template <class W>
struct BlockMatrices {
  const StepArgs& args;
  Share channels;
  Share projections;
  Share outputs;
  Share words;

  __device__ __forceinline__ BlockMatrices(const StepArgs& args, int block)
      : args(args),
        channels(channels_of(args.params.inner, block, args.plan.blocks)),
        projections(share_of(args.params.projections(), block, args.plan.blocks)),
        outputs(channels_of(args.params.dim, block, args.plan.blocks)),
        words(share_of(args.params.vocabulary, block, args.plan.blocks)) {}

  __device__ __forceinline__ MatrixRows of(Product product, int layer) const {
    const StepParams& params = args.params;
    if (product == Product::kHead) return part_of(params.head, words, params.dim);
    const StepLayer& own = args.layers[layer];
    if (product == Product::kX) return part_of(own.x_proj, projections, params.inner);
    if (product == Product::kOut) return part_of(own.out_proj, outputs, params.inner);
    const int inner = product == Product::kZ ? static_cast<int>(params.inner) : 0;
    return part_of(own.in_proj, {inner + channels.first, channels.count}, params.dim);
  }

 private:
  __device__ __forceinline__ MatrixRows part_of(const void* matrix, Share rows,
                                                int64_t columns) const {
    const W* const first = static_cast<const W*>(matrix) + rows.first * columns;
    return {reinterpret_cast<const char*>(first), rows.count, static_cast<int>(columns)};
  }
};

}  // namespace selective_scan::cuda::step
