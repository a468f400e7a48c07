// Register tiles, in the fragment order of mma.sync and wgmma.
//
// A base tile is 16x16 over a warp. Lane l holds pairs along the columns, with g = l / 4 and t = l % 4:
//   data[0] = (g, 2t..)   data[1] = (g + 8, 2t..)   data[2] = (g, 8 + 2t..)   data[3] = (g + 8, 8 + 2t..)
// Over a warpgroup, warp w holds rows 16w.. of a 64-row tile.
#pragma once

namespace kittens {

template <typename T>
concept register_tile = requires {
    T::height;
    T::packed_per_tile;
};

template <typename _T> struct rt_base {
    static constexpr int packed_per_thread = 4;
    typename base_types::packing<_T>::packed_type data[packed_per_thread];
};

// Tile of _rows x _cols elements held by one warp, as height x width base tiles.
template <typename _T, int _rows, int _cols> struct rt {
    using T = _T;
    using T2 = typename base_types::packing<T>::packed_type;
    using dtype = T2;
    static constexpr int rows = _rows, cols = _cols;
    static_assert(rows % BASE_TILE_DIM == 0 && cols % BASE_TILE_DIM == 0, "rows and columns must be multiples of 16");
    static constexpr int height = rows / BASE_TILE_DIM, width = cols / BASE_TILE_DIM;
    static constexpr int packed_per_tile = rt_base<T>::packed_per_thread;

    rt_base<T> tiles[height][width];

    __device__ inline void operator=(const T &value) {
        each_pair([&](dtype &pair) { pair = base_types::packing<T>::pack(value); });
    }
    template <typename F> __device__ inline void each_pair(F &&f) {
#pragma unroll
        for (int i = 0; i < height; i++)
#pragma unroll
            for (int j = 0; j < width; j++)
#pragma unroll
                for (int k = 0; k < packed_per_tile; k++) f(tiles[i][j].data[k]);
    }
};
template <int _r, int _c> using rt_fl = rt<float, _r, _c>;

}  // namespace kittens
