// The AES S-box as a circuit of bit operations: no table, so no address that depends on a secret.
//
// Joan Boyar and Rene Peralta, "A new combinational logic minimization technique with applications to cryptology", IACR
// ePrint 2009/191: 115 gates of two inputs, here mapped by logic synthesis to 77 gates of up to three. One gate is one
// LOP3 instruction: sl_lop3<table>(a, b, c) gives bit (a << 2 | b << 1 | c) of the table, for each of the 32 bits on its
// own. tests/unit/device/test_sbox.py runs all 256 inputs through this text, and compares them with the S-box computed
// from its definition.
#pragma once
#include "platform.cuh"

// 32 S-boxes at once: a[i] holds bit i (0 = the lowest) of each of the 32 bytes.
static __device__ __forceinline__ void sl_sbox(u32 a[8]) {
  // The paper counts from the top.
  const u32 x0 = a[7], x1 = a[6], x2 = a[5], x3 = a[4], x4 = a[3], x5 = a[2], x6 = a[1], x7 = a[0];
  const u32 t0 = sl_lop3<0xc3>(x3, x5, 0u);
  const u32 t1 = sl_lop3<0x69>(t0, x0, x6);
  const u32 t2 = sl_lop3<0x96>(t1, x1, x4);
  const u32 t3 = sl_lop3<0x69>(t2, x0, x3);
  const u32 t4 = sl_lop3<0x69>(t3, x1, x2);
  const u32 t5 = sl_lop3<0x69>(x1, x2, x7);
  const u32 t6 = sl_lop3<0x69>(t1, x4, x5);
  const u32 t7 = sl_lop3<0x69>(t6, x1, x2);
  const u32 t8 = sl_lop3<0xc3>(t3, t7, 0u);
  const u32 t9 = sl_lop3<0x06>(t2, x0, x3);
  const u32 t10 = sl_lop3<0x59>(t0, t8, t9);
  const u32 t11 = sl_lop3<0xc3>(t5, x6, 0u);
  const u32 t12 = sl_lop3<0xc3>(x0, x5, 0u);
  const u32 t13 = sl_lop3<0xc3>(t11, t12, 0u);
  const u32 t14 = sl_lop3<0x82>(t6, x7, t13);
  const u32 t15 = sl_lop3<0x0c>(t6, t1, 0u);
  const u32 t16 = sl_lop3<0x69>(t14, t15, t2);
  const u32 t17 = sl_lop3<0x3c>(t10, t16, 0u);
  const u32 t18 = sl_lop3<0x82>(t5, x3, x7);
  const u32 t19 = sl_lop3<0xa6>(t7, t12, t18);
  const u32 t20 = sl_lop3<0x69>(t19, t9, t15);
  const u32 t21 = sl_lop3<0x4e>(x6, x0, t4);
  const u32 t22 = sl_lop3<0xa6>(x6, t5, t21);
  const u32 t23 = sl_lop3<0xc3>(t22, t10, 0u);
  const u32 t24 = sl_lop3<0x0c>(t23, t17, 0u);
  const u32 t25 = sl_lop3<0x3c>(t24, t20, 0u);
  const u32 t26 = sl_lop3<0x0c>(t12, t7, 0u);
  const u32 t27 = sl_lop3<0xc3>(t5, x0, 0u);
  const u32 t28 = sl_lop3<0x82>(t3, x7, t27);
  const u32 t29 = sl_lop3<0x69>(t26, t28, t9);
  const u32 t30 = sl_lop3<0x3c>(t21, t29, 0u);
  const u32 t31 = sl_lop3<0x1b>(t23, t30, t25);
  const u32 t32 = sl_lop3<0xab>(t23, t17, t30);
  const u32 t33 = sl_lop3<0xa8>(t31, t23, t32);
  const u32 t34 = sl_lop3<0x45>(t17, t30, t20);
  const u32 t35 = sl_lop3<0x95>(t23, t17, t34);
  const u32 t36 = sl_lop3<0xc3>(t33, t35, 0u);
  const u32 t37 = sl_lop3<0xc3>(t24, t30, 0u);
  const u32 t38 = sl_lop3<0xe4>(t17, t20, t37);
  const u32 t39 = sl_lop3<0xc3>(t38, t31, 0u);
  const u32 t40 = sl_lop3<0x09>(t0, t39, t36);
  const u32 t41 = sl_lop3<0x06>(t39, x0, x3);
  const u32 t42 = sl_lop3<0xc3>(t40, t41, 0u);
  const u32 t43 = sl_lop3<0x0c>(t5, t35, 0u);
  const u32 t44 = sl_lop3<0xc3>(t42, t43, 0u);
  const u32 t45 = sl_lop3<0x82>(t33, t31, t1);
  const u32 t46 = sl_lop3<0x0c>(t33, t13, 0u);
  const u32 t47 = sl_lop3<0x69>(t44, t45, t46);
  const u32 t48 = sl_lop3<0x82>(t36, t39, t8);
  const u32 t49 = sl_lop3<0x3c>(t35, t38, 0u);
  const u32 t50 = sl_lop3<0xc0>(t49, t4, 0u);
  const u32 t51 = sl_lop3<0x56>(t39, t3, t50);
  const u32 t52 = sl_lop3<0xc3>(t48, t51, 0u);
  const u32 s0 = sl_lop3<0xc3>(t47, t52, 0u);
  const u32 t53 = sl_lop3<0x09>(t33, t6, x7);
  const u32 t54 = sl_lop3<0xc3>(t47, t53, 0u);
  const u32 t55 = sl_lop3<0x09>(t6, t31, t33);
  const u32 t56 = sl_lop3<0xc3>(t50, t55, 0u);
  const u32 s3 = sl_lop3<0xc3>(t54, t56, 0u);
  const u32 t57 = sl_lop3<0x3c>(t52, t43, 0u);
  const u32 s1 = sl_lop3<0xc3>(s3, t57, 0u);
  const u32 t58 = sl_lop3<0x95>(t36, t7, t48);
  const u32 t59 = sl_lop3<0x3c>(t44, t58, 0u);
  const u32 t60 = sl_lop3<0x28>(x0, x6, t49);
  const u32 t61 = sl_lop3<0xc0>(t31, x7, 0u);
  const u32 t62 = sl_lop3<0x69>(t56, t60, t61);
  const u32 t63 = sl_lop3<0xc0>(t38, t27, 0u);
  const u32 t64 = sl_lop3<0x96>(t59, t62, t63);
  const u32 t65 = sl_lop3<0x59>(t12, t36, t40);
  const u32 s2 = sl_lop3<0x69>(t64, t57, t65);
  const u32 t66 = sl_lop3<0x82>(t3, x7, t38);
  const u32 s4 = sl_lop3<0x96>(t54, t61, t66);
  const u32 t67 = sl_lop3<0x82>(t5, x3, t31);
  const u32 s5 = sl_lop3<0x69>(t64, t46, t67);
  const u32 t68 = sl_lop3<0x95>(t35, t11, t66);
  const u32 s6 = sl_lop3<0x69>(t59, t60, t68);
  const u32 s7 = sl_lop3<0x69>(t42, t62, t68);
  a[7] = s0; a[6] = s1; a[5] = s2; a[4] = s3; a[3] = s4; a[2] = s5; a[1] = s6; a[0] = s7;
}
