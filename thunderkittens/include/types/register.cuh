// Register tiles and vectors, in the fragment order of mma.sync and wgmma.
//
// A base tile is 16x16 over a warp. Lane l holds, with g = l / 4 and t = l % 4 (row layout, pairs along the columns):
//   data[0] = (g, 2t..)   data[1] = (g + 8, 2t..)   data[2] = (g, 8 + 2t..)   data[3] = (g + 8, 8 + 2t..)
// A column-layout tile is the same with rows and columns exchanged. Over a warpgroup, warp w holds rows 16w.. of a 64-row tile.
#pragma once

namespace kittens {
namespace ducks {
namespace rt_layout {
struct row {};
struct col {};
template <typename T>
concept all = std::is_same_v<T, row> || std::is_same_v<T, col>;
}  // namespace rt_layout
namespace rv_layout {
struct align {
    static constexpr int inner_dim = 2;
};  // along the pairs of a tile (8 copies)
struct ortho {
    static constexpr int inner_dim = 1;
};  // across the pairs of a tile (4 copies)
struct naive {
    static constexpr int inner_dim = 1;
};  // element i in lane i % 32, no copies
template <typename T>
concept all = std::is_same_v<T, align> || std::is_same_v<T, ortho> || std::is_same_v<T, naive>;
}  // namespace rv_layout
namespace rt {
struct identifier {};
template <typename T>
concept all = std::is_same_v<typename T::identifier, identifier>;
template <typename T>
concept row_layout = all<T> && std::is_same_v<typename T::layout, ducks::rt_layout::row>;
template <typename T>
concept col_layout = all<T> && std::is_same_v<typename T::layout, ducks::rt_layout::col>;
}  // namespace rt
namespace rv {
struct identifier {};
template <typename T>
concept all = std::is_same_v<typename T::identifier, identifier>;
}  // namespace rv
}  // namespace ducks

// Vector of _length elements. ortho: data[w][0] = (16w + g, 16w + g + 8); align: data[w][0], data[w][1] = pairs 2t, 8 + 2t of block w.
template <typename _T, size_t _length, ducks::rv_layout::all _layout = ducks::rv_layout::naive> struct rv {
    using identifier = ducks::rv::identifier;
    using layout = _layout;
    static constexpr bool is_naive = std::is_same_v<layout, ducks::rv_layout::naive>;
    using T = typename base_types::packing<_T>::unpacked_type;
    using T2 = typename base_types::packing<_T>::packed_type;
    using dtype = std::conditional_t<is_naive, T, T2>;
    static constexpr int length = _length;
    static_assert(length % BASE_TILE_DIM == 0, "length must be a multiple of 16");
    static constexpr int tiles = length / BASE_TILE_DIM;
    static constexpr int inner_dim = layout::inner_dim;
    static constexpr int outer_dim = is_naive ? (tiles + 1) / 2 : tiles;

    dtype data[outer_dim][inner_dim];

    __device__ inline dtype *operator[](size_t i) { return &data[i][0]; }
    __device__ inline const dtype *operator[](size_t i) const { return &data[i][0]; }
    __device__ inline void operator=(const T &value) {
#pragma unroll
        for (int i = 0; i < outer_dim; i++)
#pragma unroll
            for (int j = 0; j < inner_dim; j++)
                if constexpr (is_naive) data[i][j] = value;
                else data[i][j] = base_types::packing<T>::pack(value);
    }
};
template <int _l, ducks::rv_layout::all layout = ducks::rv_layout::naive> using rv_fl = rv<float, _l, layout>;
template <int _l, ducks::rv_layout::all layout = ducks::rv_layout::naive> using rv_bf = rv<bf16, _l, layout>;
template <int _l, ducks::rv_layout::all layout = ducks::rv_layout::naive> using rv_hf = rv<half, _l, layout>;

template <typename _T, ducks::rt_layout::all _layout> struct rt_base {
    using layout = _layout;
    using T = typename base_types::packing<_T>::unpacked_type;
    using T2 = typename base_types::packing<_T>::packed_type;
    using dtype = T2;
    static constexpr int tile_size_row = BASE_TILE_DIM, tile_size_col = BASE_TILE_DIM;
    static constexpr int elements_per_thread = 8, packed_per_thread = 4;
    static constexpr bool is_row = std::is_same_v<layout, ducks::rt_layout::row>;
    using row_vec_layout = std::conditional_t<is_row, ducks::rv_layout::align, ducks::rv_layout::ortho>;
    using col_vec_layout = std::conditional_t<is_row, ducks::rv_layout::ortho, ducks::rv_layout::align>;

    dtype data[packed_per_thread];
};

// Tile of _rows x _cols elements held by one warp, as height x width base tiles.
template <typename _T, int _rows, int _cols, ducks::rt_layout::all _layout = ducks::rt_layout::row> struct rt {
    using identifier = ducks::rt::identifier;
    using layout = _layout;
    using base = rt_base<_T, layout>;
    using T = typename base::T;
    using T2 = typename base::T2;
    using dtype = T2;
    static constexpr int rows = _rows, cols = _cols;
    static_assert(rows % BASE_TILE_DIM == 0 && cols % BASE_TILE_DIM == 0, "rows and columns must be multiples of 16");
    static constexpr int tile_size_row = BASE_TILE_DIM, tile_size_col = BASE_TILE_DIM;
    static constexpr int height = rows / BASE_TILE_DIM, width = cols / BASE_TILE_DIM;
    static constexpr int num_elements = rows * cols;
    static constexpr int elements_per_thread = num_elements / WARP_THREADS;
    static constexpr int packed_per_thread = elements_per_thread / 2;
    static constexpr int packed_per_tile = base::packed_per_thread;
    using row_vec = rv<T, cols, typename base::row_vec_layout>;
    using col_vec = rv<T, rows, typename base::col_vec_layout>;

    base tiles[height][width];

    __device__ inline void operator=(const T &value) {
#pragma unroll
        for (int i = 0; i < height; i++)
#pragma unroll
            for (int j = 0; j < width; j++)
#pragma unroll
                for (int k = 0; k < packed_per_tile; k++) tiles[i][j].data[k] = base_types::packing<T>::pack(value);
    }
};
template <int _r, int _c, ducks::rt_layout::all layout = ducks::rt_layout::row> using rt_fl = rt<float, _r, _c, layout>;
template <int _r, int _c, ducks::rt_layout::all layout = ducks::rt_layout::row> using rt_bf = rt<bf16, _r, _c, layout>;
template <int _r, int _c, ducks::rt_layout::all layout = ducks::rt_layout::row> using rt_hf = rt<half, _r, _c, layout>;

}  // namespace kittens
