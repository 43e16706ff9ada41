"""Pure mathematics of LoGRA: free functions on tensors, torch and the standard library only.

Shapes, used in every module:

    W  weight                 [out, in]
    X  activations            [tokens, in]
    dY output gradient        [tokens, out]
    A  projection             [rank, in]
    S  gradient sketch        [out, rank]     S = G A^T, with G = dY^T X never formed
    U  update factor          [out, rank]     delta W = -U A
    v  second moment          [out]           one per output row
"""
